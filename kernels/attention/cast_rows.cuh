// Which rows the cast reads, and where they go, in calls with windows and with sequences of unequal length.
#pragma once
#include "attention/schedule.cuh"

#ifndef VARLEN
#define VARLEN 0
#endif
#ifndef WINDOW
#define WINDOW 0
#endif

struct CastRows {
  ScheduleParams schedule;
  void* o;                 // rows that no sequence has are cleared here
  float* lse;              // [batch, heads_q, len_q] or null
  i64 o_stride_batch, o_stride_row, o_stride_head;
  int o_size, heads_q;     // bytes of an element
  int value_groups;        // groups of 16 keys in the layout of V
  int first_key;           // without sequences: the first that a query sees
};
static_assert(sizeof(CastRows) == sizeof(ScheduleParams) + 5 * 8 + 4 * 4, "the host writes this layout");

namespace {

constexpr bool kVarlen = VARLEN;
constexpr bool kWindow = WINDOW;
static_assert(!kVarlen || kWindow, "the form in which sequences are compiled");

struct RowPlace {
  int batch, row;  // in the tensors
  int position;    // among the keys of its sequence
  int key;         // the key at that position, over the axis of keys
  bool live;       // it exists, and a sequence has it
  bool seen;       // of a value: a query may see its key
  bool stored;     // its codes have a place
};

// Rows of q and k, and of the layout of V.
__device__ __forceinline__ int rows_of_axis(const CastRows& all, bool is_q, bool is_v) {
  return is_q ? all.schedule.rows_q : is_v ? 16 * all.value_groups : all.schedule.rows_k;
}

// The last sequence whose values start at or before a tile of V's layout.
__device__ __forceinline__ int sequence_of_tile(const ScheduleParams& p, int tile) {
  int low = -1, high = p.sequences.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (rows_of(p, middle).value_tile <= tile) low = middle; else high = middle;
  }
  return low;
}

// Row `slot` of an axis, for V of its layout. `batch` and `length`: of calls whose sequences are alike.
__device__ __forceinline__ RowPlace place_of(const CastRows& all, bool is_q, bool is_v, int batch, int slot, int length) {
  if constexpr (!kVarlen) return {batch, slot, 0, 0, slot < length, slot >= all.first_key, true};
  const ScheduleParams& p = all.schedule;
  const Sequences& lists = p.sequences;
  const int s = is_v ? sequence_of_tile(p, slot / 128) : sequence_at(is_q ? lists.q_starts : lists.k_starts, lists.count, slot);
  const int entry = is_q ? p.len_q : p.len_k, rows_of_all = is_q ? p.rows_q : p.rows_k;
  // NOTES: slots past the last row have descales, too: those of the last entry.
  RowPlace at = {min(slot, rows_of_all - 1) / entry, slot % entry, 0, 0, false, true, slot < rows_of_axis(all, is_q, is_v)};
  if (s < 0) {
    at.stored = at.stored && !is_v;
    return at;
  }
  const SequenceRows rows = rows_of(p, s);
  const int k_start = min(max(lists.k_starts[s], 0), p.rows_k);
  const Lengths length_of = {rows.len_q, rows.len_k};
  const int i = is_v ? slot - 128 * rows.value_tile : slot - (is_q ? lists.q_starts : lists.k_starts)[s];
  at.live = i < (is_q ? rows.len_q : rows.len_k);
  if (is_v) {
    at.batch = k_start / p.len_k, at.row = rows.k_row + i;
    at.seen = rows.len_q > 0 && i >= first_visible(length_of, 0, p.window_left);
    at.stored = i < ceil_div(rows.len_k, 128) * 128;
  }
  at.position = is_q ? max(0, last_visible(length_of, i, 0)) : i;
  at.key = min(k_start + at.position, p.rows_k - 1);
  return at;
}

}  // namespace
