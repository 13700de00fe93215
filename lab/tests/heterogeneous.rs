//! Scenarios over models whose layers have different heads, or none.

#[path = "../../tests/common/mod.rs"]
mod common;

use common::differing::{decilm, openelm, written};
use sigmascale::policy::PolicyKind;
use sigmascale_lab::stress::{Mode, Scenario, StressModel, StressOptions, run};

#[test]
fn every_policy_that_has_its_bounds_runs_over_heterogeneous_layers() {
    for config in [openelm(), decilm()] {
        let (folder, _, checkpoint) = written(&config);
        let model = StressModel::open(folder.path()).unwrap();
        for mode in [Mode::Logit, Mode::Operands] {
            let options = StressOptions { mode, seq_len: 24, ..StressOptions::default() };
            let result = run(Scenario::CheckpointLoad, &model, &options).unwrap();
            let refused: Vec<PolicyKind> = result.unavailable.iter().map(|one| one.policy).collect();
            assert_eq!(
                refused,
                if checkpoint.spec().qk_norm.is_some() { vec![PolicyKind::GeometryCStar] } else { vec![] }
            );
            for policy in &result.policies {
                let certain = [PolicyKind::Geometry, PolicyKind::AutoC, PolicyKind::Current].contains(&policy.policy);
                assert!(policy.layers == 3 && !(certain && policy.overflow_values > 0), "{}", policy.policy);
            }
        }
    }
}
