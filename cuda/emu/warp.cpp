// warp.cpp - shuffles, votes and reductions, run by the last lane to arrive for all lanes of the mask.
#include "block.h"

namespace emu {
void do_shuffle(void *const lanes[32], unsigned mask) {
    char values[32][8];                        // copies of all values, before any of them is replaced
    for (int i = 0; i < 32; i++)
        if (const auto *own = static_cast<Shuffle *>(lanes[i])) copy(values[i], own->value, own->size);
    for (int i = 0; i < 32; i++) {
        const auto *own = static_cast<Shuffle *>(lanes[i]);
        if (!own) continue;
        if (mask >> own->source & 1) copy(own->value, values[own->source], own->size);
        else fill(own->value, 0xff, own->size);                 // the source lane is not in the mask: undefined
    }
}

void do_ballot(void *const lanes[32], unsigned) {
    unsigned votes = 0;
    for (int i = 0; i < 32; i++)
        if (lanes[i] && *static_cast<unsigned *>(lanes[i])) votes |= 1u << i;
    for (int i = 0; i < 32; i++)
        if (lanes[i]) *static_cast<unsigned *>(lanes[i]) = votes;
}

void do_match(void *const lanes[32], unsigned) {
    for (int i = 0; i < 32; i++) {
        auto *own = static_cast<Match *>(lanes[i]);
        if (!own) continue;
        own->same = 0;
        for (int j = 0; j < 32; j++)
            if (lanes[j] && static_cast<Match *>(lanes[j])->value == own->value) own->same |= 1u << j;
    }
}

template <class T> void do_reduce(void *const lanes[32], unsigned) {
    T result{};
    bool first = true;
    for (int i = 0; i < 32; i++) {
        const auto *own = static_cast<Reduce<T> *>(lanes[i]);
        if (!own) continue;
        const T x = own->value, sum = result;
        switch (own->how) {
        case Reduction::add:     result = sum + x; break;
        case Reduction::min:     result = x < sum ? x : sum; break;
        case Reduction::max:     result = x > sum ? x : sum; break;
        case Reduction::bit_and: result = sum & x; break;
        case Reduction::bit_or:  result = sum | x; break;
        case Reduction::bit_xor: result = sum ^ x; break;
        }
        if (first) result = x;
        first = false;
    }
    for (int i = 0; i < 32; i++)
        if (lanes[i]) static_cast<Reduce<T> *>(lanes[i])->value = result;
}
template void do_reduce<int>(void *const lanes[32], unsigned mask);
template void do_reduce<unsigned>(void *const lanes[32], unsigned mask);
}
