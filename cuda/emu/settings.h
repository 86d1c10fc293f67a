// settings.h - settings of the emulator from the environment.
#pragma once
#include <cstddef>

namespace emu {
struct Settings {
    // EMU_ORDER=forward, reverse or a number: the order in which blocks, and the threads of a block, run.
    enum class Order { forward, reverse, shuffled } order;
    unsigned seed;
    int workers;                // EMU_WORKERS: number of blocks that run concurrently (1)
    bool lazy;                  // EMU_LAZY=1: a stream runs its work only when something waits for it
    bool guard;                 // EMU_GUARD=1: host access to device memory faults
    size_t stack;               // EMU_STACK: bytes of each thread's stack
    double patience;            // EMU_PATIENCE: seconds that a loop may wait for other blocks (60)
    const char *launches;       // EMU_LAUNCHES=FILE: append a line for each launch to FILE; no kernel runs (NULL)
    // Properties of the device.
    int devices;                // EMU_DEVICES: 0 for none, -1 for no driver (1)
    int major, minor;           // EMU_CAPABILITY (9.0)
    int multiprocessors;        // EMU_MULTIPROCESSORS (4: several blocks per grid, yet fast for grids that fill the device)
    size_t memory;              // EMU_MEMORY: bytes (the memory of the machine)
};
const Settings &settings();
}
