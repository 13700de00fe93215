// Integer names and the 128-byte TMA descriptor. Nothing here needs a toolkit header.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(64) TensorMap {
  u64 opaque[16];
};
static_assert(sizeof(TensorMap) == 128, "cuTensorMapEncodeTiled writes 128 bytes");

template <bool B, class T, class F> struct Select { using type = T; };
template <class T, class F> struct Select<false, T, F> { using type = F; };

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
