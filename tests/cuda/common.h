// common.h - arrays on the device and random numbers for the programs beside this file.
#pragma once
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>
#include "hopper.cuh"

template <class T> static T *to_device(const std::vector<T> &host) {
    T *device = nullptr;
    cudaMalloc(&device, host.size() * sizeof(T));
    cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
    return device;
}
template <class T> static T *on_device(size_t n) {
    T *device = nullptr;
    cudaMalloc(&device, n * sizeof(T));
    return device;
}
template <class T> static std::vector<T> to_host(const T *device, size_t n) {
    std::vector<T> host(n);
    cudaMemcpy(host.data(), device, n * sizeof(T), cudaMemcpyDeviceToHost);
    return host;
}

// From -1 to 1.
[[maybe_unused]] static std::vector<float> uniform(size_t n, unsigned seed) {
    std::vector<float> values(n);
    for (float &x : values) {
        seed = seed * 1664525u + 1013904223u;
        x = static_cast<float>(seed >> 8) / 8388608.0f - 1.0f;
    }
    return values;
}
[[maybe_unused]] static std::vector<__nv_bfloat16> as_bf16(const std::vector<float> &values) {
    std::vector<__nv_bfloat16> rounded;
    for (float x : values) rounded.push_back(__float2bfloat16(x));
    return rounded;
}
[[maybe_unused]] static std::vector<float> as_float(const std::vector<__nv_bfloat16> &values) {
    std::vector<float> wide;
    for (__nv_bfloat16 x : values) wide.push_back(__bfloat162float(x));
    return wide;
}

[[maybe_unused]] static double milliseconds() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
// NaN where one of them is NaN.
[[maybe_unused]] static double largest_difference(const std::vector<float> &found, const std::vector<double> &expected) {
    double largest = 0.0;
    for (size_t i = 0; i < found.size(); i++) {
        const double difference = std::fabs(found[i] - expected[i]);
        if (!(difference <= largest)) largest = difference;
    }
    return largest;
}
