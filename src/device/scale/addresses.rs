//! Addresses by value: what a launch of `scale_addresses` writes into an engine's tables (`kernels/scale/addresses.cu`).

use crate::cuda::{Device, DevicePtr, Kernel, Launch, Stream, sources};
use crate::error::Result;

const RUNS: usize = 8;
const WORDS: usize = 128;
/// Words of a run, one per thread.
const LONGEST: usize = 32;

/// Consecutive words, and where they go.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Run {
    to: u64,
    first: u32,
    count: u32,
}

/// The parameter of one launch. A layer's three projections need 8 runs of 124 words: their addresses (4 words each), the tensor
/// maps of the norms (16 each) and those of the Grams (32 each, of q and k).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Writes {
    runs: [Run; RUNS],
    words: [u64; WORDS],
}
const _: () = assert!(size_of::<Writes>() == 1152);

/// As few launches as hold these words, in order, and the runs of each.
fn launches(writes: impl IntoIterator<Item = (DevicePtr, Vec<u64>)>) -> Vec<(Writes, usize)> {
    let mut all: Vec<(Writes, usize)> = vec![];
    let mut used = WORDS;
    for (to, words) in writes {
        for (i, words) in words.chunks(LONGEST).enumerate() {
            if used + words.len() > WORDS || all.last().is_none_or(|(_, runs)| *runs == RUNS) {
                all.push((Writes { runs: [Run::default(); RUNS], words: [0; WORDS] }, 0));
                used = 0;
            }
            let Some((launch, runs)) = all.last_mut() else { continue };
            let to = to.0 + (i * LONGEST * size_of::<u64>()) as u64;
            launch.runs[*runs] = Run { to, first: used as u32, count: words.len() as u32 };
            launch.words[used..used + words.len()].copy_from_slice(words);
            (used, *runs) = (used + words.len(), *runs + 1);
        }
    }
    all
}

/// The kernel that writes them.
#[derive(Debug)]
pub(super) struct AddressWriter(Kernel);

impl AddressWriter {
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self(device.module(sources::ADDRESSES, &[])?.kernel("scale_addresses")?))
    }

    /// Puts words on `stream`, for the launches after it.
    ///
    /// # Safety
    /// 1. Every address reaches as many words of device memory as come with it.
    /// 2. Nothing reads them that is not ordered by `stream`, and launches after it do not start before it has ended.
    pub unsafe fn put(&self, stream: &Stream, writes: impl IntoIterator<Item = (DevicePtr, Vec<u64>)>) -> Result<()> {
        for (mut parameter, runs) in launches(writes) {
            let mut parameters = [(&raw mut parameter).cast()];
            let launch = Launch::linear(runs, LONGEST as u32, 0);
            // SAFETY: 1. the kernel has this one parameter, which lives until the driver has copied it; 2. and 3. the caller's
            // promises.
            unsafe { self.0.launch_parameters(stream, launch, &mut parameters, false)? };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// What the kernel does, block by block and thread by thread.
    fn run(launches: &[(Writes, usize)]) -> HashMap<u64, u64> {
        let mut memory = HashMap::new();
        for (writes, runs) in launches {
            for run in &writes.runs[..*runs] {
                for thread in (0..LONGEST as u32).filter(|thread| *thread < run.count) {
                    let before =
                        memory.insert(run.to + 8 * u64::from(thread), writes.words[(run.first + thread) as usize]);
                    assert_eq!(before, None, "a word is written twice");
                }
            }
        }
        memory
    }

    #[test]
    fn every_word_arrives_at_its_place() {
        let word = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for sizes in [vec![], vec![4, 16, 32], vec![1; 30], vec![128, 1, 127, 2], vec![300]] {
            let mut next = 0x1000;
            let mut writes = vec![];
            for &size in &sizes {
                writes.push((DevicePtr(next), (0..size).map(|i| word(next + 8 * i)).collect::<Vec<_>>()));
                next += 8 * size + 64;
            }
            let memory = run(&launches(writes));
            assert_eq!(memory.len() as u64, sizes.iter().sum::<u64>());
            assert!(memory.iter().all(|(address, value)| *value == word(*address)));
        }
    }

    #[test]
    fn a_layer_takes_one_launch() {
        let layer = |places: &[usize]| {
            let at = |(i, &words): (usize, &usize)| (DevicePtr(0x1000 * (i as u64 + 1)), vec![1; words]);
            launches(places.iter().enumerate().map(at)).len()
        };
        // q, k and v as they are, and v with norms of q and k.
        assert_eq!(layer(&[4, 16, 32, 4, 16, 32, 4, 16]), 1);
        assert_eq!(layer(&[4, 16, 2, 2]), 1);
    }
}
