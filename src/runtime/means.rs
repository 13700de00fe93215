//! Running means of keys and values, from the sums that calls report.

use crate::error::{Error, Result};
use crate::plan::{Center, CenterPolicy};
use crate::stats::KvSums;
use serde::{Deserialize, Serialize};

/// What a layer's keys and values have been on average: over the burn-in, and after it as the policy follows them.
///
/// A center from it stands once [`CenterPolicy::burn_in`] tokens were seen. With [`CenterPolicy::follow`] 0 it never changes
/// again, as a cache needs it; otherwise each step moves the mean by that share towards its own. A stale center costs accuracy,
/// never correctness.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunningMeans {
    /// Tokens seen.
    pub tokens: u64,
    /// Mean of each KV head's keys.
    pub k: Vec<Vec<f64>>,
    /// Mean of each KV head's values.
    pub v: Vec<Vec<f64>>,
}

impl RunningMeans {
    /// Takes in the sums of a step. A step without tokens or with sums that are not finite changes nothing.
    ///
    /// # Errors
    /// `is_mismatch` if the sums have another shape than those before.
    pub fn observe(&mut self, sums: &KvSums, policy: &CenterPolicy) -> Result<()> {
        let finite = sums.k.iter().chain(&sums.v).flatten().all(|x| x.is_finite());
        if sums.tokens == 0 || !finite {
            return Ok(());
        }
        if self.tokens == 0 {
            let zeros = |rows: &[Vec<f64>]| rows.iter().map(|row| vec![0.0; row.len()]).collect();
            (self.k, self.v) = (zeros(&sums.k), zeros(&sums.v));
        }
        let lengths = |rows: &[Vec<f64>]| rows.iter().map(Vec::len).collect::<Vec<_>>();
        if [lengths(&self.k), lengths(&self.v)] != [lengths(&sums.k), lengths(&sums.v)] {
            return Err(Error::mismatch("sums of keys and values have another shape than those of the steps before"));
        }
        let weight = if self.tokens < policy.burn_in {
            sums.tokens as f64 / (self.tokens + sums.tokens) as f64
        } else {
            policy.follow
        };
        let tokens = sums.tokens as f64;
        for (means, sums) in [(&mut self.k, &sums.k), (&mut self.v, &sums.v)] {
            for (mean, sum) in means.iter_mut().flatten().zip(sums.iter().flatten()) {
                *mean += weight * (sum / tokens - *mean);
            }
        }
        self.tokens = self.tokens.saturating_add(sums.tokens);
        Ok(())
    }

    /// The means as a center of both; `None` before the burn-in is over.
    ///
    /// # Errors
    /// As [`Center::new`].
    pub fn center(&self, layer: usize, policy: &CenterPolicy) -> Result<Option<Center>> {
        if self.tokens < policy.burn_in {
            return Ok(None);
        }
        Center::new(layer, Some(self.k.clone()), Some(self.v.clone())).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(tokens: u64, mean: f64) -> KvSums {
        let of = |x: f64| vec![vec![x * tokens as f64; 2]];
        KvSums { tokens, k: of(mean), v: of(-mean) }
    }

    #[test]
    fn the_mean_of_the_burn_in_is_frozen() {
        let policy = CenterPolicy { burn_in: 30, ..CenterPolicy::NONE };
        let mut means = RunningMeans::default();
        for (tokens, mean) in [(10, 1.0), (0, 100.0), (10, 2.0)] {
            means.observe(&sums(tokens, mean), &policy).unwrap();
            assert_eq!(means.center(0, &policy).unwrap(), None);
        }
        means.observe(&sums(20, 4.0), &policy).unwrap();
        let center = means.center(3, &policy).unwrap().unwrap();
        // (10 + 20 + 80) / 40, in BF16 exactly.
        assert_eq!((center.layer, center.c(0), center.m(0)), (3, Some(&[2.75, 2.75][..]), Some(&[-2.75, -2.75][..])));
        means.observe(&sums(1000, 50.0), &policy).unwrap();
        assert_eq!(means.center(3, &policy).unwrap().unwrap(), center);
    }

    #[test]
    fn a_followed_mean_moves_by_its_share() {
        let policy = CenterPolicy { burn_in: 1, follow: 0.25, ..CenterPolicy::NONE };
        let mut means = RunningMeans::default();
        means.observe(&sums(8, 4.0), &policy).unwrap();
        means.observe(&sums(100, 8.0), &policy).unwrap();
        assert_eq!(means.k[0], [5.0, 5.0]);
        for broken in [f64::NAN, f64::INFINITY] {
            let before = means.clone();
            means.observe(&sums(5, broken), &policy).unwrap();
            assert_eq!(means, before);
        }
        assert!(means.observe(&KvSums { tokens: 1, k: vec![], v: vec![] }, &policy).unwrap_err().is_mismatch());
    }
}
