//! A generated language with structure over long distances.
//!
//! Text is segments of three kinds, drawn at random:
//!
//! | kind | tokens | what a model can learn |
//! |---|---|---|
//! | induction | `a b`, `c d`, `a b`, .. : letters in fixed pairs, new pairs in every segment | after a letter seen before, its partner |
//! | copy | a run of letters, `again`, the same run | the second run |
//! | brackets | nested brackets of four kinds, closed at the end | which kind closes |
//!
//! The rest is noise that no model can predict, so the loss has a floor well above zero.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Tokens.
pub const VOCABULARY: usize = 48;
/// Starts a run that will be copied.
const COPY: u32 = 0;
/// Starts its copy.
const AGAIN: u32 = 1;
/// First of the opening brackets; the closing ones follow.
const BRACKETS: u32 = 2;
/// Kinds of brackets.
const KINDS: u32 = 4;
/// First letter.
const LETTERS: u32 = BRACKETS + 2 * KINDS;
/// Deepest nesting.
const DEPTH: usize = 6;

/// Tokens of one step and what follows each, `batch x len`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Sequences.
    pub batch: usize,
    /// Tokens of one.
    pub len: usize,
    /// Tokens.
    pub inputs: Vec<u32>,
    /// The token after each.
    pub targets: Vec<u32>,
}

/// The language of one seed: the same step always has the same text.
#[derive(Clone, Copy, Debug)]
pub struct Language {
    seed: u64,
}

impl Language {
    /// The language of `seed`.
    pub fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The text of a training step.
    ///
    /// ```
    /// use sigmascale_lab::train::Language;
    /// let batch = Language::new(1).batch(7, 2, 32);
    /// assert_eq!(batch.inputs[1..32], batch.targets[..31]);
    /// assert_eq!(batch, Language::new(1).batch(7, 2, 32));
    /// ```
    pub fn batch(&self, step: u64, batch: usize, len: usize) -> Batch {
        self.draw(step, batch, len)
    }

    /// Text that no training step has.
    pub fn held_out(&self, batch: usize, len: usize) -> Batch {
        self.draw(u64::MAX, batch, len)
    }

    fn draw(&self, step: u64, batch: usize, len: usize) -> Batch {
        let mut out = Batch { batch, len, inputs: Vec::new(), targets: Vec::new() };
        for row in 0..batch {
            let mut rng = StdRng::seed_from_u64(mix(mix(self.seed) ^ step) ^ mix(row as u64 + 1));
            let mut text = Vec::with_capacity(len + 64);
            while text.len() <= len {
                match rng.random_range(0..3) {
                    0 => induction(&mut rng, &mut text),
                    1 => copy(&mut rng, &mut text),
                    _ => brackets(&mut rng, &mut text),
                }
            }
            out.inputs.extend(&text[..len]);
            out.targets.extend(&text[1..=len]);
        }
        out
    }
}

/// The finalizer of splitmix64: neighboring numbers become unrelated seeds.
pub(super) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn letter(rng: &mut StdRng) -> u32 {
    rng.random_range(LETTERS..VOCABULARY as u32)
}

fn induction(rng: &mut StdRng, text: &mut Vec<u32>) {
    let mut pairs: Vec<(u32, u32)> = Vec::new();
    for _ in 0..rng.random_range(2..5) {
        let first = letter(rng);
        // One partner for a letter.
        if pairs.iter().all(|pair| pair.0 != first) {
            pairs.push((first, letter(rng)));
        }
    }
    for _ in 0..rng.random_range(6..12) {
        let (a, b) = pairs[rng.random_range(0..pairs.len())];
        text.extend([a, b]);
    }
}

fn copy(rng: &mut StdRng, text: &mut Vec<u32>) {
    let run: Vec<u32> = (0..rng.random_range(4..13)).map(|_| letter(rng)).collect();
    text.push(COPY);
    text.extend(&run);
    text.push(AGAIN);
    text.extend(&run);
}

fn brackets(rng: &mut StdRng, text: &mut Vec<u32>) {
    let mut open = Vec::new();
    for _ in 0..rng.random_range(8..20) {
        if open.is_empty() || (open.len() < DEPTH && rng.random_bool(0.5)) {
            let kind = rng.random_range(0..KINDS);
            open.push(kind);
            text.push(BRACKETS + kind);
        } else if let Some(kind) = open.pop() {
            text.push(BRACKETS + KINDS + kind);
        }
    }
    text.extend(open.into_iter().rev().map(|kind| BRACKETS + KINDS + kind));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_steps_and_rows_differ() {
        let batch = Language::new(3).batch(0, 2, 64);
        assert_ne!(batch.inputs[..64], batch.inputs[64..]);
        assert_ne!(batch, Language::new(3).batch(1, 2, 64));
        assert_ne!(batch, Language::new(4).batch(0, 2, 64));
        assert_ne!(batch, Language::new(3).held_out(2, 64));
        assert!(batch.inputs.iter().all(|token| (*token as usize) < VOCABULARY));
    }

    #[test]
    fn runs_are_copied_pairs_kept_and_brackets_closed() {
        let mut rng = StdRng::seed_from_u64(5);
        for _ in 0..50 {
            let mut text = Vec::new();
            copy(&mut rng, &mut text);
            let again = text.iter().position(|token| *token == AGAIN).unwrap();
            assert_eq!(text[1..again], text[again + 1..]);

            text.clear();
            induction(&mut rng, &mut text);
            for pair in text.chunks(2) {
                assert!(text.chunks(2).all(|other| other[0] != pair[0] || other[1] == pair[1]));
            }

            text.clear();
            brackets(&mut rng, &mut text);
            let mut open = Vec::new();
            for token in text {
                if token < BRACKETS + KINDS {
                    open.push(token);
                } else {
                    assert_eq!(open.pop(), Some(token - KINDS));
                }
            }
            assert!(open.is_empty());
        }
    }
}
