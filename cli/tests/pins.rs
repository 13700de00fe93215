//! Published and carried numbers, through the binary and through the library.

mod run;

use run::{json, sigmascale};
use serde_json::Value;
use sigmascale::bound::Tail;
use sigmascale::model::preset;

fn pins() -> Value {
    serde_json::from_str(include_str!("data/pins.json")).unwrap()
}

fn models() -> serde_json::Map<String, Value> {
    pins()["models"].as_object().unwrap().clone()
}

fn close(value: f64, pin: f64, tolerance: f64, what: &str) {
    assert!((value - pin).abs() <= tolerance, "{what}: {value}, pinned {pin}");
}

#[test]
fn constants_of_the_papers_models() {
    for (name, pin) in models() {
        let profile = json(&["calibrate", &name, "--format", "json"]);
        for key in ["gamma", "c_star", "improvement", "c_rank_agnostic"] {
            let pin = pin[key].as_f64().unwrap();
            close(profile["c_star"][key].as_f64().unwrap(), pin, 1e-9 * pin, &format!("{name} {key}"));
        }
        assert_eq!(profile["model"]["d_head"], pin["d_head"]);
        assert!(profile.get("layers").is_none(), "a config has no layers");
    }
}

#[test]
fn constants_that_the_paper_prints() {
    let printed = [
        ("gpt2-xl", 2.98, 0.074),
        ("mistral-7b", 2.26, 0.035),
        ("llama-2-13b", 2.28, 0.028),
        ("llama-2-70b", 2.32, 0.018),
    ];
    for (name, gamma, c_star) in printed {
        let profile = json(&["calibrate", name, "--format", "json"]);
        close(profile["c_star"]["gamma"].as_f64().unwrap(), gamma, 0.02, name);
        close(profile["c_star"]["c_star"].as_f64().unwrap(), c_star, 6e-4, name);
    }
}

#[test]
fn batch_and_steps_enter_the_union() {
    let expected = [("gpt2-xl", 0.0892), ("mistral-7b", 0.0422), ("llama-2-13b", 0.0340), ("llama-2-70b", 0.0216)];
    for (name, c_star) in expected {
        let profile = json(&["calibrate", name, "--batch", "8", "--steps", "3000", "--format", "json"]);
        close(profile["c_star"]["c_star"].as_f64().unwrap(), c_star, 5.1e-5, name);
    }
}

#[test]
fn sharper_tails() {
    let beta = [("gpt2-xl", 2.728), ("mistral-7b", 2.128), ("llama-2-13b", 2.148), ("llama-2-70b", 2.192)];
    for (name, pin) in models() {
        let spec = preset(&name).unwrap();
        let tail = Tail::default();
        let of = |key: &str| pin[key].as_f64().unwrap();
        close(tail.operand(&spec).unwrap(), of("operand_tail_t"), 5.1e-7, &name);
        close(tail.c_spec(&spec, spec.layers[0].d_head as f64).unwrap(), of("c_spec_flat"), 5.1e-7, &name);
        close(tail.c_spec(&spec, 1.0).unwrap(), of("c_spec_rank1"), 5.1e-7, &name);
        let gamma = beta.iter().find(|(known, _)| *known == name).unwrap().1;
        close(tail.c_star(&spec).unwrap().gamma_beta, gamma, 5.1e-4, &name);
    }
}

#[test]
fn table_names_the_assumption() {
    let text = String::from_utf8(sigmascale(&["calibrate", "mistral-7b"]).stdout).unwrap();
    assert!(text.contains("c_star 0.035214 = ") && text.contains(", gamma 2.257615,"), "{text}");
    assert!(text.contains("which assume isotropic tokens"), "{text}");
}
