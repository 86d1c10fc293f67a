// settings.h - what the environment asks of the emulator.
#pragma once
#include <cstddef>

namespace emu {
struct Settings {
    // EMU_ORDER=forward, reverse or a number: the order in which blocks, and the threads of a block, get to run.
    enum class Order { forward, reverse, shuffled } order;
    unsigned seed;
    int workers;                // EMU_WORKERS: blocks that run at a time (1)
    bool lazy;                  // EMU_LAZY=1: work waits in its stream until something waits for it
    bool guard;                 // EMU_GUARD=1: the host faults when it touches device memory
    size_t stack;               // EMU_STACK: bytes of each thread's stack
    double patience;            // EMU_PATIENCE: seconds that a loop may wait for other blocks (60)
    // What the device looks like.
    int devices;                // EMU_DEVICES: 0 for none, -1 for no driver (1)
    int major, minor;           // EMU_CAPABILITY (9.0)
    int multiprocessors;        // EMU_MULTIPROCESSORS (4: enough to have several blocks, quick where a grid fills the device)
    size_t memory;              // EMU_MEMORY: bytes (as much as the machine has)
};
const Settings &settings();
}
