// Runs CUDA C++ kernels on a CPU: one fiber per CUDA thread, one thread block at a time. Barriers and warp collectives
// are meeting points that know file and line. emulator.py compiles a .cu file behind this header.
#pragma once
#include "ptx_emu.h"
#include "abi.h"
