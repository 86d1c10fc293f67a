// emu.h - compile CUDA C++ with g++ and run it on the CPU, for tests: see docs/emulator.md.  The files in include/ have
// NVIDIA's names, so a kernel includes <cuda_runtime.h> in both builds.
#pragma once
#include "types.h"
#include "runtime.h"
#include "engine.h"
#include "language.h"
