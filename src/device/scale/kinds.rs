//! A power iteration over layers of any mix: one iteration for each kind, whose results are brought together in the order of
//! the layers.

use super::joined::Move;
use super::partition::Partition;
use super::power::check_vectors;
use super::tables::LayerInput;
use crate::cuda::sources;
use crate::cuda::{Arg, Buffer, Device, DevicePtr, Kernel, Launch, Stream};
use crate::error::Result;

/// An iteration over layers that are alike.
pub(super) trait Iteration {
    /// Puts `count` steps on the stream.
    fn steps(&self, stream: &Stream, count: usize) -> Result<()>;
    /// Estimates of the last step, layer by layer.
    fn sigma(&self) -> &Buffer<f32>;
    /// The vectors, layer by layer.
    fn vectors(&self) -> &Buffer<f32>;
    /// Goes on from saved vectors of the right number, all finite.
    fn restore(&mut self, vectors: &[f32]) -> Result<()>;
}

/// The iterations of a model.
#[derive(Debug)]
pub(super) struct Kinds<T> {
    partition: Partition,
    iterations: Vec<T>,
    /// Values of each layer's vectors.
    lengths: Vec<usize>,
    /// Where there is more than one kind.
    gathered: Option<Gathered>,
}

/// Results in the order of the layers.
#[derive(Debug)]
struct Gathered {
    kernel: Kernel,
    moves: Buffer<Move>,
    sigma: Buffer<f32>,
    vectors: Buffer<f32>,
}

impl<T: Iteration> Kinds<T> {
    /// `values`: how many estimates and values of vectors a layer has; `make` sets up the iteration of one kind.
    pub fn new(
        device: &Device,
        layers: &[LayerInput],
        values: impl Fn(&LayerInput) -> (usize, usize),
        make: impl Fn(&[LayerInput]) -> Result<T>,
    ) -> Result<Self> {
        let partition = Partition::of_power(layers)?;
        let iterations = partition
            .groups()
            .map(|members| make(&members.iter().map(|i| layers[*i]).collect::<Vec<_>>()))
            .collect::<Result<Vec<_>>>()?;
        let (estimates, lengths): (Vec<usize>, Vec<usize>) = layers.iter().map(values).unzip();
        let gathered = match iterations.len() {
            1 => None,
            _ => Some(Gathered::new(device, &partition, &iterations, &estimates, &lengths)?),
        };
        Ok(Self { partition, iterations, lengths, gathered })
    }

    /// Kinds of layers.
    pub fn count(&self) -> usize {
        self.iterations.len()
    }

    /// The iterations, one a kind.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.iterations.iter()
    }

    pub fn steps(&self, stream: &Stream, count: usize) -> Result<()> {
        self.iterations.iter().try_for_each(|iteration| iteration.steps(stream, count))?;
        self.gathered.as_ref().map_or(Ok(()), |gathered| gathered.run(stream))
    }

    pub fn sigma(&self) -> &Buffer<f32> {
        self.gathered.as_ref().map_or_else(|| self.iterations[0].sigma(), |gathered| &gathered.sigma)
    }

    pub fn vectors(&self) -> &Buffer<f32> {
        self.gathered.as_ref().map_or_else(|| self.iterations[0].vectors(), |gathered| &gathered.vectors)
    }

    pub fn restore(&mut self, vectors: &[f32]) -> Result<()> {
        check_vectors(vectors, self.vectors().len())?;
        let mut of_kinds = vec![vec![]; self.iterations.len()];
        let mut rest = vectors;
        for (layer, length) in self.lengths.iter().enumerate() {
            let (own, behind) = rest.split_at(*length);
            rest = behind;
            if let Some((kind, _)) = self.partition.place(layer) {
                of_kinds[kind].extend_from_slice(own);
            }
        }
        for (iteration, vectors) in self.iterations.iter_mut().zip(&of_kinds) {
            iteration.restore(vectors)?;
        }
        match &mut self.gathered {
            Some(gathered) => gathered.vectors.write(vectors),
            None => Ok(()),
        }
    }
}

impl Gathered {
    fn new<T: Iteration>(
        device: &Device,
        partition: &Partition,
        iterations: &[T],
        estimates: &[usize],
        lengths: &[usize],
    ) -> Result<Self> {
        let sigma = device.zeros(estimates.iter().sum())?;
        // The vectors that the iterations start from.
        let starts = iterations.iter().map(|one| one.vectors().read()).collect::<Result<Vec<_>>>()?;
        let mut vectors = vec![0f32; lengths.iter().sum()];
        let vector_runs = partition.runs(|layer| lengths[layer]);
        for run in &vector_runs {
            vectors[run.to..][..run.words].copy_from_slice(&starts[run.group][run.from..][..run.words]);
        }
        let vectors = device.upload(&vectors)?;
        let at = |base: DevicePtr, words: usize| base.offset(4 * words as u64);
        let sides = [
            (partition.runs(|layer| estimates[layer]), &sigma, T::sigma as fn(&T) -> &Buffer<f32>),
            (vector_runs, &vectors, T::vectors),
        ];
        let mut moves = vec![];
        for (runs, whole, of) in sides {
            moves.extend(runs.into_iter().map(|run| {
                Move::new(at(of(&iterations[run.group]).ptr(), run.from), at(whole.ptr(), run.to), run.words)
            }));
        }
        let kernel = device.module(sources::JOIN, &[])?.kernel("scale_join")?;
        Ok(Self { kernel, moves: device.upload(&moves)?, sigma, vectors })
    }

    fn run(&self, stream: &Stream) -> Result<()> {
        let args = [Arg::Ptr(self.moves.ptr())];
        // SAFETY: 1. the argument is the kernel's; 2. every run lies in an iteration's result and in this struct's; 3. runs do
        // not meet, and what they read was written by the launches before, by the stream's order.
        unsafe { self.kernel.launch(stream, Launch::linear(self.moves.len(), 256, 0), &args) }
    }
}
