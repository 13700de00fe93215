//! A paged KV cache in E4M3: what a kernel that reads one or appends to it has to do.
//!
//! A page holds `page_size` tokens of every KV head, row-major: K is `(pages, page_size, n_kv_heads, d_head)`, V
//! `(pages, page_size, n_kv_heads, d_v)`, one code per element. This is FlashAttention-3's layout, and that of the two halves
//! of vLLM's. Token `t` of sequence `s` is row `t % page_size` of page `block_table[s][t / page_size]`. Sequences may share
//! pages that no one writes to.
//!
//! [`PagedKv::append`] is what a cache's write kernel does: `e4m3(rope(k) * quant_scale)` and `e4m3(v * quant_scale)`, each
//! into its token's row, behind the subtraction of a center. All rows of a cache need one center.
//! [`PagedKv::gather`] gives dense keys and values for [`reference()`](super::reference()) and the other calls of this module. Neither looks at rows of a page that no sequence uses.

use super::operands::centered;
use crate::error::{Error, Result};
use crate::fp8::{Counts, Format, OnOverflow};
use crate::model::{Rope, rotate};
use crate::plan::{Center, OperandDescales};
use crate::scale::Descale;
use crate::stats::CastStats;
use std::collections::HashMap;

/// Sizes of a paged cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShape {
    /// Pages.
    pub pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Elements of one head of K.
    pub d_head: usize,
    /// Elements of one head of V.
    pub d_v: usize,
}

/// Which pages the tokens of each sequence lie in.
#[derive(Clone, Copy, Debug)]
pub struct BlockTable<'a> {
    /// Page numbers, `(sequences, pages_per_sequence)`; those past a sequence's last token may hold anything.
    pub pages: &'a [i32],
    /// Entries of a sequence.
    pub pages_per_sequence: usize,
    /// Tokens of each sequence that are in the cache.
    pub lengths: &'a [usize],
}

/// Tokens to append, packed: sequence `s` gets those from `cu_seqlens[s]` to `cu_seqlens[s + 1]`.
#[derive(Clone, Copy, Debug)]
pub struct NewTokens<'a> {
    /// Keys before RoPE, `(tokens, n_kv_heads, d_head)`.
    pub k: &'a [f32],
    /// Values, `(tokens, n_kv_heads, d_v)`.
    pub v: &'a [f32],
    /// Where the tokens of each sequence begin, and their number.
    pub cu_seqlens: &'a [usize],
}

/// What [`PagedKv::append`] reports.
#[derive(Clone, Debug, PartialEq)]
pub struct Appended {
    /// Tokens of each sequence that are in the cache now.
    pub lengths: Vec<usize>,
    /// Casts of the new keys, per KV head, after RoPE.
    pub k: Vec<CastStats>,
    /// Casts of the new values, per KV head.
    pub v: Vec<CastStats>,
}

/// The tokens of a cache, sequence after sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Gathered {
    /// Keys times their descale, with the center added, `(tokens, n_kv_heads, d_head)`.
    pub k: Vec<f32>,
    /// Values times their descale, likewise, `(tokens, n_kv_heads, d_v)`.
    pub v: Vec<f32>,
    /// Where the tokens of each sequence begin, and their number.
    pub cu_seqlens: Vec<usize>,
}

/// Keys and values in pages.
///
/// ```
/// use sigmascale::Descale;
/// use sigmascale::attention::{BlockTable, NewTokens, PageShape, PagedKv};
/// use sigmascale::fp8::OnOverflow;
/// use sigmascale::plan::OperandDescales;
///
/// let mut cache = PagedKv::new(PageShape { pages: 3, page_size: 2, n_kv_heads: 1, d_head: 16, d_v: 16 })?;
/// let one = vec![Descale::ONE];
/// let descales = OperandDescales { q: one.clone(), k: one.clone(), v: Some(one), o: None };
/// // Three tokens of one sequence, in pages 2 and 0.
/// let table = |lengths| BlockTable { pages: &[2, 0], pages_per_sequence: 2, lengths };
/// let (k, v) = ([1.5; 48], [0.5; 48]);
/// let new = NewTokens { k: &k, v: &v, cu_seqlens: &[0, 3] };
/// let appended = cache.append(&table(&[0]), &new, &descales, (None, None), OnOverflow::Saturate)?;
/// assert_eq!((appended.lengths.as_slice(), appended.k[0].amax), (&[3][..], 1.5));
/// assert_eq!(cache.gather(&table(&appended.lengths), &descales, None)?.k, k);
/// # Ok::<(), sigmascale::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct PagedKv {
    shape: PageShape,
    /// Codes of K.
    pub k: Vec<u8>,
    /// Codes of V.
    pub v: Vec<u8>,
}

impl PagedKv {
    /// A cache of zeros.
    ///
    /// # Errors
    /// `is_argument` if a size is zero or the cache is too large to index.
    pub fn new(shape: PageShape) -> Result<Self> {
        let PageShape { pages, page_size, n_kv_heads, d_head, d_v } = shape;
        let bytes = |d: usize| [page_size, n_kv_heads, d].into_iter().try_fold(pages, usize::checked_mul);
        match (bytes(d_head), bytes(d_v)) {
            (Some(k), Some(v)) if k.min(v) > 0 => Ok(Self { shape, k: vec![0; k], v: vec![0; v] }),
            _ => Err(Error::argument(format_args!("a paged cache of {shape:?} is empty or too large to index"))),
        }
    }

    /// Its sizes.
    pub fn shape(&self) -> PageShape {
        self.shape
    }

    /// The tokens of every sequence, of a cache with this center.
    ///
    /// # Errors
    /// `is_argument` if the table does not have one row per sequence, is too short for a length or names a page that does not exist;
    /// `is_mismatch` if there is not one descale a KV head, or the center is of another shape.
    pub fn gather(
        &self,
        table: &BlockTable<'_>,
        descales: &OperandDescales,
        center: Option<&Center>,
    ) -> Result<Gathered> {
        table.check(&self.shape)?;
        self.check_center(center)?;
        let (k_descales, v_descales) = self.descales(descales)?;
        let mut gathered = Gathered { k: Vec::new(), v: Vec::new(), cu_seqlens: vec![0] };
        let PageShape { n_kv_heads, d_head, d_v, .. } = self.shape;
        for (sequence, &length) in table.lengths.iter().enumerate() {
            for token in 0..length {
                let row = table.row(&self.shape, sequence, token)?;
                for head in 0..n_kv_heads {
                    let at = row * n_kv_heads + head;
                    let decode = |codes: &[u8], descale: Descale, center: Option<&[f32]>, to: &mut Vec<f32>| {
                        let values = codes.iter().map(|code| Format::E4m3.decode(*code));
                        match center {
                            None => to.extend(values.map(|x| x * descale.get())),
                            Some(center) => to.extend(values.zip(center).map(|(x, c)| x.mul_add(descale.get(), *c))),
                        }
                    };
                    let (k, v) = (&self.k[at * d_head..][..d_head], &self.v[at * d_v..][..d_v]);
                    decode(k, k_descales[head], center.and_then(|center| center.c(head)), &mut gathered.k);
                    decode(v, v_descales[head], center.and_then(|center| center.m(head)), &mut gathered.v);
                }
            }
            gathered.cu_seqlens.push(gathered.cu_seqlens[sequence] + length);
        }
        Ok(gathered)
    }

    /// Appends new tokens to those that the table counts: keys rotated by their positions, the center subtracted, keys and values
    /// cast by the descales. Casts are counted of what is left. Nothing is written if anything is refused.
    ///
    /// # Errors
    /// As [`PagedKv::gather`]; `is_argument` if the new tokens do not fit the table or the shape, or two of them have the
    /// same row; `is_unsupported` or `is_mismatch` if the rotation's angles are unknown or do not fit.
    pub fn append(
        &mut self,
        table: &BlockTable<'_>,
        new: &NewTokens<'_>,
        descales: &OperandDescales,
        (rope, center): (Option<&Rope>, Option<&Center>),
        on_overflow: OnOverflow,
    ) -> Result<Appended> {
        table.check(&self.shape)?;
        self.check_center(center)?;
        let (k_descales, v_descales) = self.descales(descales)?;
        let (k_descales, v_descales) = (k_descales.to_vec(), v_descales.to_vec());
        let PageShape { n_kv_heads, d_head, d_v, .. } = self.shape;
        let rows = self.new_rows(table, new)?;
        let mut k = new.k.to_vec();
        if let Some(rope) = rope {
            for ((token, _), values) in rows.iter().zip(k.chunks_exact_mut(n_kv_heads * d_head)) {
                rotate("the cache", rope, *token, (n_kv_heads, d_head), values)?;
            }
        }
        type Row<'c> = &'c dyn Fn(usize) -> Option<&'c [f32]>;
        let write =
            |to: &mut [u8], x: &[f32], d: usize, descales: &[Descale], center: Row<'_>| -> Result<Vec<CastStats>> {
                let mut counts = vec![Counts::default(); n_kv_heads];
                for ((_, row), token) in rows.iter().zip(x.chunks_exact(n_kv_heads * d)) {
                    for (head, x) in token.chunks_exact(d).enumerate() {
                        let codes = &mut to[(row * n_kv_heads + head) * d..][..d];
                        let multiplier = descales[head].quant_scale().get();
                        let own = center(head).map(|center| centered(x, center));
                        let x = own.as_deref().unwrap_or(x);
                        counts[head] += Format::E4m3.encode_slice(x, multiplier, on_overflow, codes)?;
                    }
                }
                Ok(counts.into_iter().map(CastStats::from).collect())
            };
        let k = write(&mut self.k, &k, d_head, &k_descales, &|head| center?.c(head))?;
        let v = write(&mut self.v, new.v, d_v, &v_descales, &|head| center?.m(head))?;
        let added = new.cu_seqlens.windows(2).map(|ends| ends[1] - ends[0]);
        Ok(Appended { lengths: table.lengths.iter().zip(added).map(|(length, n)| length + n).collect(), k, v })
    }

    /// The position and the row of each new token.
    fn new_rows(&self, table: &BlockTable<'_>, new: &NewTokens<'_>) -> Result<Vec<(usize, usize)>> {
        let PageShape { n_kv_heads, d_head, d_v, .. } = self.shape;
        let sequences = table.lengths.len();
        let ends = new.cu_seqlens;
        if ends.len() != sequences + 1 || ends[0] != 0 || !ends.is_sorted() {
            return Err(Error::argument(format_args!(
                "cu_seqlens {ends:?} must have {} entries that start at 0 and do not fall",
                sequences + 1
            )));
        }
        for (name, have, d) in [("k", new.k.len(), d_head), ("v", new.v.len(), d_v)] {
            let tokens = ends[sequences];
            if tokens.checked_mul(n_kv_heads * d) != Some(have) {
                return Err(Error::argument(format_args!(
                    "new {name} has {have} values where {tokens} tokens of {n_kv_heads} heads of {d} are asked for"
                )));
            }
        }
        let mut rows = Vec::with_capacity(ends[sequences]);
        let mut taken = HashMap::new();
        for (sequence, &length) in table.lengths.iter().enumerate() {
            for token in length..length + ends[sequence + 1] - ends[sequence] {
                let row = table.row(&self.shape, sequence, token)?;
                if let Some(other) = taken.insert(row, sequence) {
                    let page = row / self.shape.page_size;
                    return Err(Error::argument(format_args!(
                        "sequences {other} and {sequence} both append to one row of page {page}"
                    )));
                }
                rows.push((token, row));
            }
        }
        Ok(rows)
    }

    fn check_center(&self, center: Option<&Center>) -> Result<()> {
        let PageShape { n_kv_heads, d_head, d_v, .. } = self.shape;
        center.map_or(Ok(()), |center| center.check(n_kv_heads, d_head, d_v))
    }

    fn descales<'d>(&self, descales: &'d OperandDescales) -> Result<(&'d [Descale], &'d [Descale])> {
        let v = descales.v.as_deref().ok_or_else(|| {
            Error::mismatch("a cache in E4M3 needs descales of v, and the plan has none: v has no bound in this layer")
        })?;
        for (name, row) in [("k", &*descales.k), ("v", v)] {
            if row.len() != self.shape.n_kv_heads {
                let (have, want) = (row.len(), self.shape.n_kv_heads);
                return Err(Error::mismatch(format_args!("{have} {name} descales do not fit {want} KV heads")));
            }
        }
        Ok((&descales.k, v))
    }
}

impl BlockTable<'_> {
    fn check(&self, shape: &PageShape) -> Result<()> {
        let sequences = self.lengths.len();
        if sequences.checked_mul(self.pages_per_sequence) != Some(self.pages.len()) {
            return Err(Error::argument(format_args!(
                "a block table of {} entries does not hold {} pages of each of {sequences} sequences",
                self.pages.len(),
                self.pages_per_sequence
            )));
        }
        for (sequence, &length) in self.lengths.iter().enumerate() {
            for page in 0..length.div_ceil(shape.page_size) {
                self.row(shape, sequence, page * shape.page_size)?;
            }
        }
        Ok(())
    }

    /// The row of a token among those of all pages.
    fn row(&self, shape: &PageShape, sequence: usize, token: usize) -> Result<usize> {
        let (at, within) = (token / shape.page_size, token % shape.page_size);
        if at >= self.pages_per_sequence {
            return Err(Error::argument(format_args!(
                "token {token} of sequence {sequence} needs page {at} of the block table, which has {} of {} tokens",
                self.pages_per_sequence, shape.page_size
            )));
        }
        let page = self.pages[sequence * self.pages_per_sequence + at];
        match usize::try_from(page) {
            Ok(page) if page < shape.pages => Ok(page * shape.page_size + within),
            _ => Err(Error::argument(format_args!(
                "block_table[{sequence}][{at}] = {page} is not one of the cache's {} pages",
                shape.pages
            ))),
        }
    }
}
