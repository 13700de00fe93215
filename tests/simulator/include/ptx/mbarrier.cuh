#pragma once
#include "common/types.cuh"

#ifndef EVERY_LANE
#define EVERY_LANE 0
#endif

namespace ptx {
constexpr u32 kWarpArrivals = EVERY_LANE ? 32 : 1;
inline bool arrives(u32 lane) { return EVERY_LANE || lane == 0; }
inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared((const u8*)p); }
inline void mbarrier_init(u32 bar, u32 arrivals) {
  simulator::mbarrier(bar) = {(int16_t)arrivals, (int16_t)arrivals, 0, 0};
}
inline void mbarrier_arrive(u32 bar) { simulator::arrive(bar); }
inline void mbarrier_arrive_if(u32 bar, bool condition) { if (condition) simulator::arrive(bar); }
inline void mbarrier_expect_tx(u32 bar, u32 bytes) { simulator::Mbarrier& b = simulator::mbarrier(bar); b.bytes += bytes; }
inline void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) { mbarrier_expect_tx(bar, bytes), simulator::arrive(bar); }
inline u32 mbarrier_test_wait(u32 bar, u32 parity) {
  simulator::yield();
  return simulator::completed(simulator::mbarrier(bar), parity);
}
inline u32 mbarrier_try_wait(u32 bar, u32 parity) { return mbarrier_test_wait(bar, parity); }
inline void mbarrier_wait(u32 bar, u32 parity) { simulator::wait_phase(bar, parity); }
// All lanes go on together.
inline void mbarrier_wait_uniform(u32 bar, u32 parity) { simulator::wait_phase(bar, parity), simulator::collect(0); }
inline void mbarrier_wait_uniform(u32 bar, u32 parity, u32 ready) {
  if (!ready) simulator::wait_phase(bar, parity);
  simulator::collect(0);
}
template <int Id, int Threads> void named_barrier_sync() { simulator::barrier_sync(Id, Threads); }
}  // namespace ptx
