use super::*;
use crate::model::RopeLayout;

fn spec(json: &str) -> Result<AttentionSpec> {
    AttentionSpec::from_config_json(json.as_bytes(), Path::new("m/config.json"))
}

fn llama(extra: &str) -> Result<AttentionSpec> {
    spec(&format!(
        r#"{{"model_type":"llama","hidden_size":256,"num_hidden_layers":2,"num_attention_heads":4,
           "max_position_embeddings":131072{extra}}}"#
    ))
}

#[test]
fn both_generations_of_rope_keys_agree() {
    let old = llama(r#","rope_theta":500000.0,"torch_dtype":"bfloat16""#).unwrap();
    let new = llama(r#","rope_parameters":{"rope_theta":500000.0,"rope_type":"default"},"dtype":"bfloat16""#).unwrap();
    assert_eq!(old, new);
    let rope = old.layers[1].rope.as_ref().unwrap();
    assert_eq!((rope.rotary_dim, rope.layout), (64, RopeLayout::HalfSplit));
    let angles = rope.inv_freq.as_ref().unwrap();
    assert!((angles[16] - 500_000f64.powf(-0.5)).abs() < 1e-15);
}

#[test]
fn scaled_rotations() {
    let factor = |extra: &str| llama(extra).unwrap().layers[0].rope.clone().unwrap();
    let yarn = factor(
        r#","rope_theta":1e4,"rope_scaling":{"type":"yarn","factor":4.0,"original_max_position_embeddings":32768}"#,
    );
    assert!((yarn.attention_factor - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-15);
    // mscale equal to mscale_all_dim: no factor is left.
    let even = factor(
        r#","rope_theta":1e4,"rope_parameters":{"rope_type":"yarn","rope_theta":1e4,"factor":4.0,"mscale":1.0,"mscale_all_dim":1.0,"original_max_position_embeddings":32768}"#,
    );
    assert_eq!(even.attention_factor, 1.0);
    let linear = factor(r#","rope_theta":1e4,"rope_scaling":{"rope_type":"linear","factor":8.0}"#);
    assert_eq!(linear.inv_freq.unwrap()[0], 0.125);
    assert_eq!(factor(r#","rope_scaling":{"type":"dynamic","factor":2.0}"#).inv_freq, None);
    let llama3 = factor(
        r#","rope_theta":5e5,"rope_scaling":{"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192}"#,
    );
    let angles = llama3.inv_freq.unwrap();
    let plain = |b: i32| 5e5f64.powf(-2.0 * f64::from(b) / 64.0);
    assert_eq!(angles[0], 1.0);
    assert!((angles[31] - plain(31) / 8.0).abs() < 1e-18);
    assert!(llama(r#","rope_scaling":{"rope_type":"spiral"}"#).unwrap_err().is_unsupported());
}

#[test]
fn longrope_factor_is_that_of_phi3() {
    let spec = spec(
        r#"{"model_type":"phi3","hidden_size":3072,"num_hidden_layers":1,"num_attention_heads":32,
            "max_position_embeddings":131072,"original_max_position_embeddings":4096,
            "rope_scaling":{"type":"su","short_factor":[1.0],"long_factor":[1.0]}}"#,
    )
    .unwrap();
    let factor = spec.layers[0].rope.as_ref().unwrap().attention_factor;
    assert!((factor - (1.0 + 32f64.ln() / 4096f64.ln()).sqrt()).abs() < 1e-15);
}

#[test]
fn where_engines_differ_on_a_factor_the_largest_counts() {
    let factor = |extra: &str| llama(extra).unwrap().layers[0].rope.as_ref().unwrap().attention_factor;
    let long = |original: usize, extra: &str| {
        factor(&format!(
            r#","rope_scaling":{{"type":"longrope","original_max_position_embeddings":{original},
                "short_factor":[1.0],"long_factor":[1.0]{extra}}}"#
        ))
    };
    let root = |factor: f64, original: f64| (1.0 + factor.ln() / original.ln()).sqrt();
    // A stated factor, or the ratio of the lengths.
    assert!((long(131_072, r#","factor":32.0"#) - root(32.0, 131_072.0)).abs() < 1e-15);
    assert!((long(4096, r#","factor":2.0"#) - root(32.0, 4096.0)).abs() < 1e-15);
    // Scales of cosines and sines, which not all engines read.
    assert!((long(4096, r#","short_mscale":1.0,"long_mscale":1.0"#) - root(32.0, 4096.0)).abs() < 1e-15);
    assert_eq!(long(4096, r#","short_mscale":3.0,"long_mscale":2.0"#), 3.0);
    let scales = r#","short_mscale":2.0,"long_mscale":3.0"#;
    assert_eq!(factor(&format!(r#","rope_scaling":{{"type":"linear","factor":2.0{scales}}}"#)), 3.0);
    assert_eq!(factor(&format!(r#","rope_scaling":{{"type":"default"{scales}}}"#)), 1.0);
    // Two generations of keys side by side.
    let yarn = r#""rope_scaling":{"type":"yarn","factor":4.0,"original_max_position_embeddings":32768}"#;
    let both = format!(r#","rope_parameters":{{"rope_type":"default","rope_theta":10000.0}},{yarn}"#);
    assert!((factor(&both) - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-15);
    assert_eq!(llama(&both).unwrap().layers[0].rope.as_ref().unwrap().inv_freq, None);
}

/// Among the rotation's settings or beside them: the one that makes the larger factor counts.
#[test]
fn the_original_length_counts_wherever_it_stands() {
    let rope = |kind: &str, extra: &str| {
        let config = format!(
            r#","rope_theta":1e4,"original_max_position_embeddings":8192,
               "rope_scaling":{{"rope_type":"{kind}","original_max_position_embeddings":65536{extra}}}"#
        );
        llama(&config).unwrap().layers[0].rope.clone().unwrap()
    };
    let yarn = rope("yarn", r#","factor":null"#);
    assert!((yarn.attention_factor - (0.1 * 16f64.ln() + 1.0)).abs() < 1e-15, "{}", yarn.attention_factor);
    assert_eq!(yarn.inv_freq, None);
    // Under these scales the factor falls with the ratio of the lengths.
    let falling = rope("yarn", r#","factor":null,"mscale":0.5,"mscale_all_dim":1.0"#).attention_factor;
    let by = |ratio: f64| (0.05 * ratio.ln() + 1.0) / (0.1 * ratio.ln() + 1.0);
    assert!((falling - by(2.0)).abs() < 1e-15 && by(2.0) > by(16.0), "{falling}");
    let long = rope("longrope", "").attention_factor;
    assert!((long - (1.0 + 16f64.ln() / 8192f64.ln()).sqrt()).abs() < 1e-15, "{long}");
    let llama3 = rope("llama3", r#","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0"#);
    assert_eq!((llama3.attention_factor, llama3.inv_freq), (1.0, None));
}

/// Some releases update one dictionary by the other.
#[test]
fn two_sets_of_rope_settings_are_read_merged_too() {
    let factor = |extra: &str| llama(extra).unwrap().layers[0].rope.as_ref().unwrap().attention_factor;
    let yarn = r#"{"rope_type":"yarn","factor":8.0,"original_max_position_embeddings":16384}"#;
    for pair in [("rope_parameters", "rope_scaling"), ("rope_scaling", "rope_parameters")] {
        let merged = format!(r#","rope_theta":1e4,"{}":{yarn},"{}":{{"attention_factor":2.9}}"#, pair.0, pair.1);
        assert_eq!(factor(&merged), 2.9, "{pair:?}");
    }
    let nested = spec(
        r#"{"model_type":"gemma3_text","hidden_size":640,"num_hidden_layers":2,"max_position_embeddings":131072,
            "layer_types":["full_attention","sliding_attention"],"rope_scaling":{"attention_factor":2.9},
            "rope_parameters":{"full_attention":{"rope_type":"yarn","factor":8.0},"sliding_attention":{"rope_type":"default"}}}"#,
    )
    .unwrap();
    assert_eq!(nested.layers[0].rope.as_ref().unwrap().attention_factor, 2.9);
}

#[test]
fn a_rotation_that_engines_read_differently_has_every_reading() {
    let dims = |model: &str, extra: &str| {
        let rope = spec(&format!(
            r#"{{"model_type":"{model}","hidden_size":256,"num_hidden_layers":2,"num_attention_heads":2,"head_dim":128,
                "num_key_value_heads":1{extra}}}"#
        ))
        .unwrap()
        .layers[0]
            .rope
            .clone()
            .unwrap();
        [vec![rope.rotary_dim], rope.other_dims].concat()
    };
    for model in ["minimax", "minimax_m2"] {
        assert_eq!(dims(model, ""), [128]);
        assert_eq!(dims(model, r#","rotary_dim":128"#), [128]);
        assert_eq!(dims(model, r#","rotary_dim":64"#), [64, 128]);
        assert_eq!(dims(model, r#","rotary_dim":64,"partial_rotary_factor":0.25"#), [64, 32, 128]);
    }
    let scaled = r#"{"model_type":"minimax_m2","hidden_size":256,"num_hidden_layers":2,"num_attention_heads":2,"head_dim":128,
        "num_key_value_heads":1,"rotary_dim":64,"rope_scaling":{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":64}}"#;
    let error = spec(scaled).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("scaled rotation"), "{error}");
}

#[test]
fn only_gpt2_scales_by_the_layer() {
    let scale = |model: &str| {
        let spec = spec(&format!(
            r#"{{"model_type":"{model}","n_embd":64,"n_head":4,"n_layer":3,"scale_attn_by_inverse_layer_idx":true}}"#
        ))
        .unwrap();
        spec.layers[2].softmax_scale
    };
    assert_eq!((scale("gpt2"), scale("gpt_bigcode")), (0.25 / 3.0, 0.25));
}

#[test]
fn gemma3_layers_alternate() {
    let old = spec(
        r#"{"model_type":"gemma3","text_config":{"hidden_size":2560,"num_hidden_layers":12,
            "rope_scaling":{"rope_type":"linear","factor":8.0}}}"#,
    )
    .unwrap();
    let first = &old.layers[0];
    assert_eq!((first.n_q_heads, first.n_kv_heads, first.d_head, old.layers.len()), (8, 4, 256, 12));
    let angle = |spec: &AttentionSpec, layer: usize, b: usize| {
        spec.layers[layer].rope.as_ref().unwrap().inv_freq.as_ref().unwrap()[b]
    };
    assert_eq!((angle(&old, 0, 0), angle(&old, 5, 0)), (1.0, 0.125));
    assert!((angle(&old, 0, 64) - 0.01).abs() < 1e-15);
    assert!((angle(&old, 5, 64) - 1e-3 / 8.0).abs() < 1e-15);
    let new = spec(
        r#"{"model_type":"gemma3_text","hidden_size":2560,"num_hidden_layers":12,"rope_parameters":{
            "full_attention":{"rope_type":"linear","factor":8.0,"rope_theta":1000000.0},
            "sliding_attention":{"rope_type":"default","rope_theta":10000.0}}}"#,
    )
    .unwrap();
    assert_eq!(old.layers, new.layers);
}

#[test]
fn layer_types_choose_among_nested_rotations() {
    // Nested sets without a base take it from the old keys.
    let mixed = spec(
        r#"{"model_type":"gemma3_text","hidden_size":640,"num_hidden_layers":2,"rope_theta":1000000,
            "rope_local_base_freq":10000,"layer_types":["full_attention","sliding_attention"],"rope_parameters":{
            "full_attention":{"factor":8.0,"rope_type":"linear"},"sliding_attention":{"rope_type":"default"}}}"#,
    )
    .unwrap();
    let angle = |spec: &AttentionSpec, layer: usize, b: usize| {
        spec.layers[layer].rope.as_ref().unwrap().inv_freq.as_ref().unwrap()[b]
    };
    assert!((angle(&mixed, 0, 64) - 1e-3 / 8.0).abs() < 1e-15);
    assert!((angle(&mixed, 1, 64) - 0.01).abs() < 1e-15);
    // Scaling in the old keys is that of the full layers alone.
    let olmo3 = spec(
        r#"{"model_type":"olmo3","hidden_size":256,"num_hidden_layers":4,"num_attention_heads":4,"rope_theta":500000,
            "max_position_embeddings":65536,"rope_scaling":{"rope_type":"yarn","factor":8.0,
            "original_max_position_embeddings":8192,"attention_factor":1.2079441541679836}}"#,
    )
    .unwrap();
    let factors: Vec<f64> = olmo3.layers.iter().map(|layer| layer.rope.as_ref().unwrap().attention_factor).collect();
    assert_eq!(factors, [1.0, 1.0, 1.0, 1.2079441541679836]);
    assert_eq!(olmo3.norm.kind, crate::model::NormKind::None);
}

#[test]
fn the_rotated_share_stands_in_either_place() {
    let dim = |extra: &str| {
        let json = format!(
            r#"{{"model_type":"gpt_neox","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4{extra}}}"#
        );
        spec(&json).unwrap().layers[0].rope.as_ref().unwrap().rotary_dim
    };
    assert_eq!(dim(""), 16);
    assert_eq!(dim(r#","rotary_pct":1.0"#), 64);
    assert_eq!(dim(r#","rope_parameters":{"partial_rotary_factor":0.5,"rope_theta":1e4,"rope_type":"default"}"#), 32);
}

#[test]
fn softmax_scales() {
    let scales = |spec: &AttentionSpec| spec.layers.iter().map(|layer| layer.softmax_scale).collect::<Vec<_>>();
    let gpt2 = spec(r#"{"model_type":"gpt2","n_layer":3,"scale_attn_by_inverse_layer_idx":true}"#).unwrap();
    assert_eq!(scales(&gpt2), [0.125, 0.0625, 0.125 / 3.0]);
    let plain = spec(r#"{"model_type":"gpt2","n_layer":1,"scale_attn_weights":false}"#).unwrap();
    assert_eq!(scales(&plain), [1.0]);
    let gemma = spec(
        r#"{"model_type":"gemma2","hidden_size":4608,"num_hidden_layers":1,"num_attention_heads":32,
            "num_key_value_heads":16,"head_dim":128,"query_pre_attn_scalar":144}"#,
    )
    .unwrap();
    assert_eq!((scales(&gemma)[0], gemma.soft_cap), (1.0 / 12.0, Some(50.0)));
}

#[test]
fn rotation_by_several_axes_has_no_one_set_of_angles() {
    let vision = |rope: &str| {
        spec(&format!(
            r#"{{"model_type":"qwen2_5_vl","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4,
                "num_key_value_heads":2{rope}}}"#
        ))
    };
    for kind in ["mrope", "default"] {
        let several = format!(r#","rope_scaling":{{"type":"{kind}","mrope_section":[16,8,8]}}"#);
        let rope = vision(&several).unwrap().layers[0].rope.clone().unwrap();
        assert_eq!((rope.rotary_dim, rope.attention_factor, rope.inv_freq), (64, 1.0, None));
    }
    assert!(vision("").unwrap().layers[0].rope.clone().unwrap().inv_freq.is_some());
    let stretched = r#","rope_scaling":{"type":"yarn","factor":4.0,"original_max_position_embeddings":32768,"mrope_section":[16,8,8]}"#;
    let rope = vision(stretched).unwrap().layers[0].rope.clone().unwrap();
    assert!(rope.attention_factor > 1.1 && rope.inv_freq.is_none());
    assert!(vision(r#","rope_scaling":{"type":"mrope"}"#).unwrap_err().is_unsupported());
    let missing = spec(r#"{"model_type":"qwen2_5_vl"}"#).unwrap_err().to_string();
    assert!(missing.contains("`text_config`"), "{missing}");
}

/// As the reference implementation has them, in 8 layers.
#[test]
fn windows_are_those_of_each_layer() {
    let windows = |family: &str, extra: &str| -> Vec<Option<usize>> {
        let json = format!(
            r#"{{"model_type":"{family}","hidden_size":256,"num_hidden_layers":8,"num_attention_heads":4,
                "num_key_value_heads":2{extra}}}"#
        );
        spec(&json).unwrap().layers.iter().map(|layer| layer.window).collect()
    };
    let is = |family: &str, extra: &str, window: usize, slides: &str| {
        let want: Vec<_> = slides.chars().map(|c| (c == 's').then_some(window)).collect();
        assert_eq!(windows(family, extra), want, "{family} {extra}");
    };
    is("llama", r#","sliding_window":7"#, 0, "........");
    is("mistral", "", 4096, "ssssssss");
    is("mistral", r#","sliding_window":null"#, 0, "........");
    is("mistral", r#","sliding_window":0"#, 0, "........");
    is("mixtral", "", 0, "........");
    is("mixtral", r#","sliding_window":7"#, 7, "ssssssss");
    is("qwen2", r#","sliding_window":9,"max_window_layers":5"#, 0, "........");
    is("qwen2", r#","sliding_window":9,"max_window_layers":5,"use_sliding_window":true"#, 9, ".....sss");
    is("qwen3", r#","max_window_layers":0,"use_sliding_window":true"#, 4096, "ssssssss");
    is("qwen3_moe", r#","use_sliding_window":true"#, 4096, "ssssssss");
    is("qwen2_moe", r#","max_window_layers":5,"use_sliding_window":true"#, 4096, "s.s.s...");
    is("gemma2", "", 4096, "s.s.s.s.");
    is("vaultgemma", "", 4096, "s.s.s.s.");
    is("gemma3_text", r#","sliding_window":12"#, 12, "sssss.ss");
    is("gemma3_text", r#","sliding_window":12,"sliding_window_pattern":2"#, 12, "s.s.s.s.");
    is("gemma3_text", r#","sliding_window":12,"sliding_window_pattern":4"#, 12, "sss.sss.");
    is("gemma3_text", r#","sliding_window":12,"use_bidirectional_attention":true"#, 7, "sssss.ss");
    is("olmo3", "", 4096, "sss.sss.");
    is("phi3", r#","sliding_window":2047"#, 2047, "ssssssss");
    is("smollm3", r#","sliding_window":5"#, 0, "........");
    is("smollm3", r#","sliding_window":5,"use_sliding_window":true"#, 5, "...s...s");
    is("gpt_oss", "", 128, "s.s.s.s.");
    let types = "full_attention,full_attention,sliding_attention,full_attention,sliding_attention,sliding_attention,\
                 sliding_attention,full_attention";
    let types: Vec<String> = types.split(',').map(|name| format!("{name:?}")).collect();
    is("gpt_oss", &format!(r#","sliding_window":16,"layer_types":[{}]"#, types.join(",")), 16, "..s.sss.");
    is("mistral", &format!(r#","sliding_window":16,"layer_types":[{}]"#, types.join(",")), 16, "..s.sss.");
    is("cohere2", "", 4096, "sss.sss.");
    is("starcoder2", r#","sliding_window":4096"#, 4096, "ssssssss");
    is("exaone4", "", 4096, "sss.sss.");
    is("exaone4", r#","sliding_window":null"#, 0, "........");
    is("afmoe", "", 1024, "sss.sss.");
    is("cwm", "", 8192, ".sss.sss");
    is("granite_swa", "", 128, ".sss.sss");
    let rope = r#","rope_parameters":{"rope_type":"default","rope_theta":10000.0}"#;
    is("ministral3", rope, 0, "........");
    is("ministral", "", 4096, "ssssssss");
    is("dots1", "", 0, "........");
    is("dots1", r#","max_window_layers":3"#, 4096, "...sssss");
    is("phimoe", r#","sliding_window":3"#, 3, "ssssssss");
    let refused = |value: &str| {
        let json = format!(
            r#"{{"model_type":"mistral","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4,
                "num_key_value_heads":4,"sliding_window":{value}}}"#
        );
        spec(&json).unwrap_err().to_string()
    };
    for value in ["-1", "2.5", "\"wide\""] {
        assert!(refused(value).contains("`sliding_window`"), "{}", refused(value));
    }
}

#[test]
fn sinks_are_known_by_the_family() {
    let config = |family: &str| {
        spec(&format!(
            r#"{{"model_type":"{family}","hidden_size":256,"num_hidden_layers":2,"num_attention_heads":4,
                "num_key_value_heads":2}}"#
        ))
        .unwrap()
    };
    let saved = |family: &str| serde_json::to_string(&config(family)).unwrap();
    for (family, sinks) in [("gpt_oss", true), ("granite_swa", true), ("mistral", false), ("llama", false)] {
        let spec = config(family);
        assert!(spec.layers.iter().all(|layer| layer.sinks == sinks), "{family}");
        // A saved spec has them, and the windows.
        let read: AttentionSpec = serde_json::from_str(&saved(family)).unwrap();
        assert_eq!(read.layers, spec.layers);
        assert_eq!((saved(family).contains("sinks"), saved(family).contains("window")), (sinks, family != "llama"));
    }
    for (whole, short, field) in [("[128,null]", "[128]", "window"), ("[true,true]", "[true]", "sinks")] {
        let short = saved("gpt_oss").replace(whole, short);
        let error = serde_json::from_str::<AttentionSpec>(&short).unwrap_err().to_string();
        assert!(error.contains(&format!("`{field}`")), "{error}");
    }
}

#[test]
fn where_only_sliding_layers_rotate() {
    let rotated = |family: &str, extra: &str| -> Vec<bool> {
        let json = format!(
            r#"{{"model_type":"{family}","hidden_size":256,"num_hidden_layers":4,"num_attention_heads":4,
                "num_key_value_heads":4{extra}}}"#
        );
        spec(&json).unwrap().layers.iter().map(|layer| layer.rope.is_some()).collect()
    };
    assert_eq!(rotated("cohere2", ""), [true, true, true, false]);
    assert_eq!(rotated("cohere2", r#","sliding_window_pattern":2"#), [true, false, true, false]);
    let full = r#","layer_types":["full_attention","full_attention","full_attention","full_attention"]"#;
    assert_eq!(rotated("exaone4", full), [false; 4]);
    assert_eq!(rotated("exaone4", &format!(r#"{full},"sliding_window":null"#)), [true; 4]);
}

#[test]
fn a_layer_can_have_a_base_of_its_own() {
    let granite = |extra: &str| {
        spec(&format!(
            r#"{{"model_type":"granite_swa","hidden_size":256,"num_hidden_layers":3,"num_attention_heads":4,
                "rope_parameters":{{"rope_type":"default","rope_theta":500.0}}{extra}}}"#
        ))
    };
    let bases = |spec: AttentionSpec| -> Vec<Option<f64>> {
        // angle b = base^(-2 b / 64), so the base is angle 16 to the power -2.
        let base = |rope: &Option<crate::model::Rope>| Some(rope.as_ref()?.inv_freq.as_ref()?[16].powi(-2).round());
        spec.layers.iter().map(|layer| base(&layer.rope)).collect()
    };
    assert_eq!(bases(granite("").unwrap()), [Some(500.0); 3]);
    let own = granite(r#","layer_rope_theta":[10000.0,0,500000]"#).unwrap();
    assert_eq!(bases(own), [Some(10_000.0), None, Some(500_000.0)]);
    let refused = |extra: &str| granite(extra).unwrap_err().to_string();
    assert!(refused(r#","layer_rope_theta":[1.0,2.0]"#).contains("layer_rope_theta"));
    assert!(refused(r#","layer_rope_theta":[1.0,2.0,-1.0]"#).contains("layer_rope_theta"));
}

#[test]
fn a_scale_that_is_not_stated_is_the_usual_one() {
    let scale = |extra: &str| {
        let json = format!(
            r#"{{"model_type":"hyperclovax","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4{extra}}}"#
        );
        spec(&json).unwrap().layers[0].softmax_scale
    };
    assert_eq!((scale(""), scale(r#","attention_multiplier":null"#)), (0.125, 0.125));
    assert_eq!(scale(r#","attention_multiplier":0.5"#), 0.5);
}

#[test]
fn hybrid_models_name_the_layers_that_have_attention() {
    let numbers = |model_type: &str, extra: &str| {
        spec(&format!(
            r#"{{"model_type":"{model_type}","hidden_size":256,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":64{extra}}}"#
        ))
        .map(|spec| spec.layers.iter().map(|layer| layer.number).collect::<Vec<_>>())
    };
    let eight = |model_type: &str, extra: &str| numbers(model_type, &format!(r#","num_hidden_layers":8{extra}"#));
    assert_eq!(eight("qwen3_next", "").unwrap(), [3, 7]);
    assert_eq!(eight("qwen3_next", r#","full_attention_interval":3"#).unwrap(), [2, 5]);
    assert_eq!(eight("jamba", "").unwrap(), [4]);
    assert_eq!(eight("jamba", r#","attn_layer_period":4,"attn_layer_offset":0"#).unwrap(), [0, 4]);
    assert_eq!(eight("lfm2", "").unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(eight("lfm2", r#","full_attn_idxs":[2,5]"#).unwrap(), [2, 5]);
    assert_eq!(eight("bamba", r#","attn_layer_indices":[1,6]"#).unwrap(), [1, 6]);
    assert_eq!(eight("minimax", "").unwrap(), [0, 2, 4, 6]);
    assert_eq!(numbers("nemotron_h", r#","hybrid_override_pattern":"M-M*-E*""#).unwrap(), [3, 6]);
    let kinds = r#","layers_block_type":["mamba","attention","moe","full_attention"]"#;
    assert_eq!(numbers("nemotron_h", kinds).unwrap(), [1, 3]);
    let refused = |model_type: &str, extra: &str| numbers(model_type, extra).unwrap_err().to_string();
    assert!(refused("nemotron_h", r#","hybrid_override_pattern":"M?""#).contains("'?'"));
    assert!(refused("nemotron_h", "").contains("`num_hidden_layers`"));
    assert!(
        refused("nemotron_h", r#","num_hidden_layers":3,"hybrid_override_pattern":"M*""#)
            .contains("hybrid_override_pattern")
    );
    assert!(refused("bamba", r#","num_hidden_layers":8"#).contains("no layer has attention"));
    assert!(
        refused("bamba", r#","num_hidden_layers":2,"attn_layer_indices":[2]"#)
            .contains("a list of layer numbers below 2")
    );
    assert!(refused("jamba", r#","num_hidden_layers":8,"attn_layer_offset":8"#).contains("attn_layer_offset"));
    assert!(refused("lfm2", r#","num_hidden_layers":1,"layer_types":["retention"]"#).contains("retention"));
}

#[test]
fn a_key_can_say_whether_layers_rotate() {
    let rotated = |extra: &str| {
        let json = format!(
            r#"{{"model_type":"granitemoehybrid","hidden_size":256,"num_hidden_layers":2,"num_attention_heads":4,
                "layer_types":["mamba","attention"]{extra}}}"#
        );
        spec(&json).unwrap().layers.iter().map(|layer| layer.rope.is_some()).collect::<Vec<_>>()
    };
    assert_eq!(rotated(r#","position_embedding_type":"rope""#), [true]);
    assert_eq!((rotated(r#","position_embedding_type":"nope""#), rotated("")), (vec![false], vec![false]));
}

#[test]
fn a_factor_can_grow_with_the_position() {
    let ministral = |beta: &str| {
        spec(&format!(
            r#"{{"model_type":"mistral3","text_config":{{"model_type":"ministral3","hidden_size":256,"num_hidden_layers":1,
                "num_attention_heads":2,"num_key_value_heads":1,"max_position_embeddings":262144,"rope_parameters":
                {{"rope_type":"yarn","rope_theta":1e6,"factor":16.0,"original_max_position_embeddings":16384,"mscale":1.0,
                "mscale_all_dim":1.0{beta}}}}}}}"#
        ))
    };
    let grows = ministral(r#","llama_4_scaling_beta":0.1"#).unwrap();
    let factor = 1.0 + 0.1 * 16f64.ln();
    assert!((grows.layers[0].query_factor() - factor).abs() < 1e-15);
    assert!((grows.layers[0].logit_scale() - factor / 128f64.sqrt()).abs() < 1e-15);
    assert_eq!(ministral("").unwrap().layers[0].temperature, None);
    assert!(ministral(r#","llama_4_scaling_beta":-0.1"#).unwrap_err().to_string().contains("llama_4_scaling_beta"));
    let outside = spec(
        r#"{"model_type":"ministral3","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":1,"max_position_embeddings":262144,
            "original_max_position_embeddings":8192,"rope_parameters":{"rope_type":"default","rope_theta":1e6,
            "original_max_position_embeddings":16384,"llama_4_scaling_beta":0.1}}"#,
    );
    assert_eq!(outside.unwrap().layers[0].temperature.unwrap().period, 8192);
    let elsewhere = llama(r#","rope_parameters":{"rope_type":"default","rope_theta":1e4,"llama_4_scaling_beta":0.1}"#);
    assert!(elsewhere.unwrap_err().to_string().contains("llama_4_scaling_beta"));

    let llama4 = |extra: &str| {
        spec(&format!(
            r#"{{"model_type":"llama4_text","hidden_size":256,"num_hidden_layers":8,"num_attention_heads":2,
                "num_key_value_heads":1,"max_position_embeddings":1048576,"no_rope_layers":[]{extra}}}"#
        ))
    };
    let factors = |spec: AttentionSpec| spec.layers.iter().map(LayerSpec::query_factor).collect::<Vec<_>>();
    let grown = factors(llama4("").unwrap());
    let last = 1.0 + 0.1 * 129f64.ln();
    assert!(
        grown.iter().enumerate().all(|(i, f)| (f - if i % 4 == 3 { last } else { 1.0 }).abs() < 1e-15),
        "{grown:?}"
    );
    for off in ["false", "0"] {
        assert_eq!(factors(llama4(&format!(r#","attn_temperature_tuning":{off}"#)).unwrap()), [1.0; 8]);
    }
    // Scout: layers with rotation normalise q and k, the others grow.
    let scout = llama4(r#","use_qk_norm":true"#).unwrap();
    let normed = |layer: &LayerSpec| scout.qk_norm_of(layer).is_some();
    assert!(
        scout
            .layers
            .iter()
            .all(|layer| normed(layer) == layer.rope.is_some() && normed(layer) == layer.temperature.is_none())
    );
    assert!(llama4(r#","floor_scale":0.5"#).unwrap_err().to_string().contains("floor_scale"));
}

#[test]
fn what_two_sets_of_rope_settings_say_must_agree() {
    let both = |model: &str, parameters: &str, scaling: &str| {
        spec(&format!(
            r#"{{"model_type":"{model}","hidden_size":256,"num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,
                "head_dim":128,"max_position_embeddings":65536,"rope_theta":1e4,"full_attention_interval":2,
                "rope_parameters":{{"rope_type":"default"{parameters}}},"rope_scaling":{{"rope_type":"default"{scaling}}}}}"#
        ))
    };
    let grows = r#","llama_4_scaling_beta":0.1,"original_max_position_embeddings":16384"#;
    let sooner = r#","llama_4_scaling_beta":0.1,"original_max_position_embeddings":8192"#;
    assert!(both("ministral3", grows, grows).unwrap().layers[0].query_factor() > 1.0);
    for (parameters, scaling) in [(grows, sooner), ("", grows), (grows, "")] {
        let error = both("ministral3", parameters, scaling).unwrap_err().to_string();
        assert!(error.contains("`rope_scaling`"), "{error}");
    }
    assert!(both("llama", "", grows).unwrap_err().to_string().contains("llama_4_scaling_beta"));
    let half = r#","partial_rotary_factor":0.5"#;
    assert!(both("glm4", "", "").is_ok());
    assert!(both("phi", half, half).is_ok());
    let error = both("qwen3_next", half, "").unwrap_err().to_string();
    assert!(error.contains("`rope_scaling`"), "{error}");
}

#[test]
fn a_share_that_releases_read_differently_is_refused() {
    let with = |model: &str, extra: &str| {
        spec(&format!(
            r#"{{"model_type":"{model}","hidden_size":256,"num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,
                "max_position_embeddings":4096,"attn_layer_indices":[0],"full_attention_interval":2{extra}}}"#
        ))
    };
    let error = |model, extra| with(model, extra).unwrap_err().to_string();
    assert!(error("qwen3_next", r#","partial_rotary_factor":null"#).contains("partial_rotary_factor"));
    assert!(error("bamba", r#","partial_rotary_factor":0.25"#).contains("partial_rotary_factor"));
    assert!(error("bamba", r#","attn_rotary_emb":16"#).contains("`attn_rotary_emb`"));
    let bamba = with("bamba", r#","partial_rotary_factor":0.5,"attn_rotary_emb":64"#).unwrap();
    assert_eq!(bamba.layers[0].rope.as_ref().unwrap().rotary_dim, 64);
}

#[test]
fn an_infinity_that_nothing_needs_does_no_harm() {
    let limits = r#","time_step_limit":[0.0,Infinity],"floor":-Infinity,"other":NaN,"name":"a \" NaN \\""#;
    assert_eq!(llama(limits).unwrap(), llama("").unwrap());
    assert!(llama(r#","rope_theta":Infinity"#).unwrap_err().to_string().contains("rope_theta"));
    assert!(llama(r#","rope_theta":NaN1"#).is_err() && llama(r#","x":Inf"#).is_err());
}

#[test]
fn rotated_channels_can_be_counted() {
    let dim = |extra: &str| {
        let json = format!(r#"{{"model_type":"gptj","n_embd":1024,"n_layer":1,"n_head":4{extra}}}"#);
        spec(&json).map(|spec| spec.layers[0].rope.clone().unwrap().rotary_dim)
    };
    assert_eq!(dim("").unwrap(), 64);
    assert_eq!(dim(r#","rotary_dim":128"#).unwrap(), 128);
    assert_eq!(dim(r#","rotary_dim":null"#).unwrap(), 256);
    assert!(dim(r#","rotary_dim":300"#).is_err() && dim(r#","rotary_dim":33"#).is_err());
}

#[test]
fn a_norm_that_could_lengthen_its_input_is_refused() {
    let with = |epsilon: &str| {
        spec(&format!(
            r#"{{"model_type":"llama","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4,
                "rms_norm_eps":{epsilon}}}"#
        ))
    };
    let error = with("-1e-6").unwrap_err();
    assert!(error.to_string().contains("`rms_norm_eps`"), "{error}");
    // Squares of a small token underflow: without an epsilon above them, what they are divided by has no digits left.
    for epsilon in ["0", "0.0", "1e-40"] {
        let error = with(epsilon).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("underflow"), "{error}");
    }
    assert!(with("1e-12").is_ok());
}

#[test]
fn refusals_name_what_is_refused() {
    let says = |json: &str, part: &str| {
        let error = spec(json).unwrap_err();
        assert!(error.is_unsupported(), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    };
    says(r#"{"model_type":"axk2"}"#, "query latent without its norm");
    says(r#"{"model_type":"mistral_large4"}"#, "cached latents of earlier layers");
    says(r#"{"model_type":"mamba"}"#, "unknown model type `mamba`");
    says(
        r#"{"model_type":"falcon","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4,"alibi":true}"#,
        "ALiBi",
    );
    says(
        r#"{"model_type":"bert","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4,
           "position_embedding_type":"relative_key"}"#,
        "relative position",
    );
    says(
        r#"{"model_type":"olmo","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4,"clip_qkv":8.0}"#,
        "clipping can raise a logit",
    );
    says(
        r#"{"model_type":"opt","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4,
           "do_layer_norm_before":false}"#,
        "after attention",
    );
    says(r#"{"model_type":"gpt_bigcode","n_embd":256,"n_layer":1,"n_head":4,"multi_query":false}"#, "multi-query");
    says(
        r#"{"model_type":"llama","hidden_size":48,"num_hidden_layers":1,"num_attention_heads":4}"#,
        "head dimension 12",
    );
}

#[test]
fn a_config_without_a_rotation_has_that_of_its_family() {
    let factor = |extra: &str| {
        let json = format!(
            r#"{{"model_type":"gpt_oss","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":8{extra}}}"#
        );
        spec(&json).unwrap().layers[0].rope.as_ref().unwrap().attention_factor
    };
    let yarn = 0.1 * 32f64.ln() + 1.0;
    for none in
        ["", r#","rope_parameters":null"#, r#","rope_scaling":null,"rope_theta":150000"#, r#","rope_scaling":{}"#]
    {
        assert!((factor(none) - yarn).abs() < 1e-15, "{none}");
    }
    assert_eq!(factor(r#","rope_parameters":{"rope_type":"default","rope_theta":150000.0}"#), 1.0);
    let ministral = spec(
        r#"{"model_type":"ministral3","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":8,
            "max_position_embeddings":262144}"#,
    );
    // The reference's default makes queries grow.
    assert!(ministral.is_ok_and(|spec| spec.layers[0].query_factor() > 1.2));
}

/// The settings of either kind of layer reach the layers that a release may take for that kind.
#[test]
fn gemma3_keys_that_a_release_leaves_unread_are_read_both_ways() {
    let factors = |model: &str, extra: &str| -> Vec<f64> {
        let json = format!(
            r#"{{"model_type":"{model}","hidden_size":256,"num_hidden_layers":6,"num_attention_heads":4,
                "max_position_embeddings":65536{extra}}}"#
        );
        spec(&json).unwrap().layers.iter().map(|layer| layer.rope.as_ref().unwrap().attention_factor).collect()
    };
    let yarn = |factor: f64| {
        format!(
            r#"{{"rope_type":"yarn","factor":8.0,"original_max_position_embeddings":8192,"attention_factor":{factor}}}"#
        )
    };
    let pattern = format!(r#","_sliding_window_pattern":4,"rope_scaling":{}"#, yarn(3.0));
    assert_eq!(factors("gemma3_text", &pattern), [1.0, 1.0, 1.0, 3.0, 1.0, 3.0]);
    let read = format!(r#","sliding_window_pattern":4,"rope_scaling":{}"#, yarn(3.0));
    assert_eq!(factors("gemma3_text", &read), [1.0, 1.0, 1.0, 3.0, 1.0, 1.0]);
    for (model, full) in [("gemma3_text", 5), ("olmo3", 3)] {
        for (flat, most) in [(0.5, 1.0), (3.0, 3.0)] {
            let found = factors(model, &format!(r#","rope_parameters":{}"#, yarn(flat)));
            assert_eq!((found[full], found[0]), (most, 1.0), "{model} {flat}");
        }
    }
}

#[test]
fn a_share_under_a_key_that_a_release_leaves_unread_has_both_readings() {
    let dims = |json: &str| {
        let rope = spec(json).unwrap().layers[0].rope.clone().unwrap();
        [vec![rope.rotary_dim], rope.other_dims].concat()
    };
    let neox = |extra: &str| {
        dims(&format!(
            r#"{{"model_type":"gpt_neox","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":4{extra}}}"#
        ))
    };
    assert_eq!(neox(r#","partial_rotary_factor":0.5"#), [16, 32]);
    assert_eq!(neox(r#","partial_rotary_factor":0.5,"rotary_pct":1.0"#), [64, 32]);
    assert_eq!(neox(r#","partial_rotary_factor":0.5,"rope_parameters":{"partial_rotary_factor":0.25}"#), [16, 32]);
    let gptj = |extra: &str| dims(&format!(r#"{{"model_type":"gptj","n_embd":512,"n_layer":1,"n_head":2{extra}}}"#));
    assert_eq!(gptj(r#","partial_rotary_factor":0.125"#), [64, 32]);
    assert_eq!(gptj(r#","partial_rotary_factor":0.25,"rotary_dim":128"#), [128, 64]);
    let small = spec(r#"{"model_type":"gptj","n_embd":64,"n_layer":1,"n_head":2}"#).unwrap_err().to_string();
    assert!(small.contains("`rotary_dim`"), "{small}");
}

/// Layers of Laguna differ in query heads and in the rotated share of a head.
#[test]
fn query_heads_and_rotated_shares_may_differ_by_layer() {
    let laguna = |extra: &str| {
        spec(&format!(
            r#"{{"model_type":"laguna","hidden_size":256,"num_hidden_layers":2,"num_attention_heads":16,"max_position_embeddings":512,
                "layer_types":["full_attention","sliding_attention"]{extra}}}"#
        ))
    };
    let own = laguna(r#","num_attention_heads_per_layer":[16,24]"#).unwrap();
    let of = |layer: usize| {
        let own = &own.layers[layer];
        (own.n_q_heads, own.n_kv_heads, own.d_head, own.rope.as_ref().unwrap().rotary_dim, own.window)
    };
    assert_eq!((of(0), of(1)), ((16, 8, 128, 64, None), (24, 8, 128, 128, Some(512))));
    let base = |layer: usize| own.layers[layer].rope.as_ref().unwrap().inv_freq.as_ref().unwrap()[1];
    assert!(
        (base(0) - 500_000f64.powf(-1.0 / 32.0)).abs() < 1e-12 && (base(1) - 10_000f64.powf(-1.0 / 64.0)).abs() < 1e-12
    );
    assert_eq!(laguna("").unwrap().layers[1].n_q_heads, 16);
    let error = laguna(r#","num_attention_heads_per_layer":[16,20]"#).unwrap_err().to_string();
    assert!(error.contains("20 query heads"), "{error}");
}

#[test]
fn every_description_of_the_stored_weights_is_read() {
    let compressed = r#""quant_method":"compressed-tensors","format":"float-quantized""#;
    let turned = format!(r#"{{{compressed},"transform_config":{{"config_groups":{{"u":{{"type":"hadamard"}}}}}}}}"#);
    let plain = format!("{{{compressed}}}");
    let parsed = |text: &str| Config::parse(text.as_bytes(), Path::new("config.json")).unwrap();
    let wrapped = |outer: &str, inner: &str| {
        parsed(&format!(
            r#"{{"model_type":"mistral3"{outer},"text_config":{{"model_type":"mistral","hidden_size":256,
                "num_hidden_layers":1,"num_attention_heads":8{inner}}}}}"#
        ))
    };
    let outer = format!(r#","quantization_config":{plain}"#);
    assert!(wrapped(&outer, &outer).spec.fp8_inputs && wrapped("", &outer).spec.fp8_inputs);
    // What has no bound as weights still has a config.
    let hidden = |text: String| {
        let error = wrapped(&outer, &text).check_stored(Path::new("folder")).unwrap_err();
        assert!(error.is_unsupported(), "{error}");
        error.to_string()
    };
    assert!(wrapped(&outer, &outer).check_stored(Path::new("folder")).is_ok());
    assert!(hidden(format!(r#","quantization_config":{turned}"#)).contains("transform_config"));
    assert!(hidden(format!(r#","compression_config":{turned}"#)).contains("transform_config"));
    for other in [r#"{"quant_method":"gptq"}"#, r#"{"quant_method":"fp8"}"#] {
        assert!(hidden(format!(r#","quantization_config":{other}"#)).contains("_config` contradicts"));
    }
    assert!(hidden(r#","quantization_config":{"quant_method":"hqq"}"#.to_owned()).contains("hqq"));
    let top = parsed(&format!(
        r#"{{"model_type":"llama","hidden_size":256,"num_hidden_layers":1,"num_attention_heads":8,"compression_config":{turned}}}"#
    ));
    assert!(top.check_stored(Path::new("folder")).unwrap_err().to_string().contains("transform_config"));
}

/// KV heads and channels of 24 heads in 1536 channels where the config leaves them out, as transformers 5.23 has them.
#[test]
fn absent_sizes_are_those_of_the_reference() {
    let reference = [
        ("afmoe", 24, 128),
        ("apertus", 24, 64),
        ("arcee", 24, 64),
        ("cohere", 24, 64),
        ("cohere2", 24, 64),
        ("cwm", 8, 128),
        ("ernie4_5", 2, 128),
        ("ernie4_5_moe", 4, 64),
        ("flex_olmo", 24, 64),
        ("gemma2", 4, 256),
        ("gemma3_text", 4, 256),
        ("glm", 2, 128),
        ("glm4", 2, 128),
        ("glm4_moe", 8, 64),
        ("gpt_oss", 8, 64),
        ("granite", 24, 64),
        ("granite_swa", 4, 64),
        ("granitemoe", 24, 64),
        ("granitemoe_swa", 24, 64),
        ("granitemoeshared", 24, 64),
        ("hy_v3", 8, 128),
        ("hyperclovax", 24, 64),
        ("jais2", 24, 64),
        ("jamba", 8, 64),
        ("laguna", 8, 128),
        ("lfm2", 8, 64),
        ("llama", 24, 64),
        ("llama4_text", 8, 128),
        ("minimax", 8, 64),
        ("minimax_m2", 8, 128),
        ("ministral", 8, 64),
        ("ministral3", 8, 128),
        ("mistral", 8, 64),
        ("mixtral", 8, 64),
        ("nanochat", 24, 64),
        ("nemotron", 24, 64),
        ("olmo", 24, 64),
        ("olmo2", 24, 64),
        ("olmo3", 24, 64),
        ("olmo_hybrid", 24, 64),
        ("olmoe", 24, 64),
        ("phi", 24, 64),
        ("phi3", 24, 64),
        ("phimoe", 8, 64),
        ("qwen2_vl_text", 8, 64),
        ("qwen3_moe", 4, 64),
        ("qwen3_next", 2, 256),
        ("qwen3_5_text", 4, 256),
        ("qwen3_5_moe_text", 2, 256),
        ("seed_oss", 8, 128),
        ("smollm3", 4, 64),
        ("solar_open", 8, 128),
        ("starcoder2", 2, 64),
        ("vaultgemma", 4, 256),
    ];
    // Their defaults have more KV heads than 24 query heads are divided among.
    let of_32 =
        [("dots1", 32, 64), ("exaone4", 32, 64), ("qwen2", 32, 64), ("qwen3", 32, 128), ("qwen3_vl_text", 32, 128)];
    let of_16 = [("gemma", 16, 256), ("qwen2_moe", 16, 64), ("qwen3_vl_moe_text", 16, 64)];
    let of_20 = [("helium", 20, 128)];
    let all = reference.map(|row| (row, 24)).into_iter().chain(of_32.map(|row| (row, 32)));
    for ((model, n_kv, d_head), heads) in all.chain(of_16.map(|row| (row, 16))).chain(of_20.map(|row| (row, 20))) {
        let json = format!(
            r#"{{"model_type":"{model}","hidden_size":{},"num_hidden_layers":8,"num_attention_heads":{heads},
                "max_position_embeddings":4096}}"#,
            64 * heads
        );
        let spec = spec(&json).unwrap();
        let layer = &spec.layers[0];
        assert_eq!((layer.n_kv_heads, layer.d_head), (n_kv, d_head), "{model}");
    }
}

#[test]
fn a_norm_is_what_the_keys_make_it() {
    let cohere = |extra: &str| {
        spec(&format!(
            r#"{{"model_type":"cohere2_moe","hidden_size":256,"num_hidden_layers":4,"num_attention_heads":4,"head_dim":64{extra}}}"#
        ))
        .unwrap()
    };
    for (extra, kind) in [
        ("", NormKind::LayerNorm),
        (r#","rms_norm_eps":null"#, NormKind::LayerNorm),
        (r#","rms_norm_eps":1e-5"#, NormKind::RmsNorm),
    ] {
        assert_eq!(cohere(extra).norm.kind, kind, "{extra}");
        // Full layers may be rotated.
        assert!(cohere(extra).layers.iter().all(|layer| layer.rope.is_some()));
    }
}

#[test]
fn the_first_of_a_pattern_can_be_the_full_one() {
    let decoder = |extra: &str| {
        spec(&format!(
            r#"{{"model_type":"modernbert-decoder","hidden_size":256,"num_hidden_layers":4,"num_attention_heads":4{extra}}}"#
        ))
    };
    let bases = |extra: &str| -> Vec<f64> {
        let angle = |layer: &LayerSpec| layer.rope.as_ref().unwrap().inv_freq.as_ref().unwrap()[16];
        decoder(extra).unwrap().layers.iter().map(|layer| angle(layer).powi(-2).round()).collect()
    };
    assert_eq!(bases(""), [160_000.0, 10_000.0, 10_000.0, 160_000.0]);
    assert_eq!(bases(r#","global_attn_every_n_layers":2,"global_rope_theta":4e4"#), [4e4, 1e4, 4e4, 1e4]);
    for (extra, why) in
        [(r#","norm_bias":true"#, "norm_bias"), (r#","rope_scaling":{"type":"linear"}"#, "rope_scaling")]
    {
        let error = decoder(extra).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains(why), "{error}");
    }
}

#[test]
fn kinds_of_layers_are_those_of_the_family() {
    let kinds = |model_type: &str, kinds: &str| {
        spec(&format!(
            r#"{{"model_type":"{model_type}","hidden_size":256,"num_hidden_layers":2,"num_attention_heads":4,
                "num_key_value_heads":4,"head_dim":64{kinds}}}"#
        ))
    };
    let numbers = |spec: AttentionSpec| spec.layers.iter().map(|layer| layer.number).collect::<Vec<_>>();
    assert_eq!(numbers(kinds("lfm3", r#","layer_types":["conv","sliding_attention"]"#).unwrap()), [1]);
    let error = kinds("lfm3", "").unwrap_err();
    assert!(error.is_format() && error.to_string().contains("`layer_types`"), "{error}");
    // A model all of whose layers have attention has no other kind.
    let error = kinds("qwen3", r#","layer_types":["conv","full_attention"]"#).unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("\"conv\""), "{error}");
    let sparse = r#","layer_types":["full_attention","minimax_m3_sparse"]"#;
    assert_eq!(numbers(kinds("minimax_m3_vl_text", sparse).unwrap()), [0, 1]);
    let error = kinds("gemma4_assistant", "").unwrap_err();
    assert!(error.is_unsupported() && error.to_string().contains("drafts for"), "{error}");
    for kind in ["full_attention", "qwen_sparse_attention"] {
        let sparse = format!(r#","hc_count":2,"layer_types":["linear_attention","{kind}"]"#);
        let spec = kinds("qwen4_exp_text", &sparse).unwrap();
        assert_eq!((spec.streams, spec.norm.gain), (Some(2), GainForm::Plain));
        assert_eq!(numbers(spec), [1]);
    }
    let error = kinds("qwen4_exp_text", r#","hc_count":0,"full_attention_interval":1"#).unwrap_err();
    assert!(error.is_format() && error.to_string().contains("hc_count"), "{error}");
    let packed = r#","quantization_config":{"quant_method":"bitnet","quantization_mode":"online"}"#;
    assert!(kinds("bitnet", packed).is_ok(), "weights are refused where they are read");
}

#[test]
fn heads_of_full_layers_are_those_of_either_release() {
    let heads = |extra: &str| {
        let json = format!(
            r#"{{"model_type":"gemma4_text","hidden_size":64,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,
                "head_dim":16,"layer_types":["sliding_attention","full_attention"]{extra}}}"#
        );
        spec(&json).map(|spec| spec.layers.iter().map(|own| (own.n_kv_heads, own.d_head)).collect::<Vec<_>>())
    };
    for (extra, of_full) in [
        ("", (2, 512)),
        (r#","global_head_dim":16"#, (2, 16)),
        (r#","per_layer_config":{}"#, (2, 16)),
        (r#","per_layer_config":{"1":{"head_dim":32}}"#, (2, 32)),
        (r#","per_layer_config":{"01":{"head_dim":32}}"#, (2, 32)),
        (r#","per_layer_config":{"1":{"num_key_value_heads":1}},"attention_k_eq_v":true"#, (1, 16)),
    ] {
        assert_eq!(heads(extra).unwrap(), [(2, 16), of_full], "{extra}");
    }
    for extra in [
        r#"{"0":{"head_dim":32}}"#,
        r#"{"1":{"head_dim":32},"2":{"head_dim":32}}"#,
        r#"{"full":{"head_dim":32}}"#,
        r#"{"1":{"head_dim":32},"01":{"head_dim":16}}"#,
    ] {
        let error = heads(&format!(r#","per_layer_config":{extra}"#)).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("`per_layer_config`"), "{error}");
    }
}

/// Step 3.5 on the hub has lists by layer, which go on with the layers for multi-token prediction; transformers saves dictionaries.
#[test]
fn both_forms_of_step_are_one_model() {
    let read = |extra: &str| {
        spec(&format!(
            r#"{{"model_type":"step3p5","hidden_size":64,"num_hidden_layers":3,"num_attention_heads":4,"head_dim":16,
                "max_position_embeddings":64,"sliding_window":8{extra}}}"#
        ))
    };
    let hub = r#","num_attention_groups":2,"num_nextn_predict_layers":1,
        "layer_types":["full_attention","sliding_attention","full_attention","sliding_attention"],
        "attention_other_setting":{"attention_type":"sliding_attention","num_attention_heads":6,"num_attention_groups":2},
        "rope_theta":[5000000.0,10000.0,5000000.0,10000.0],"partial_rotary_factors":[0.5,1.0,0.5,1.0]"#;
    let saved = r#","num_key_value_heads":2,"layer_types":["full_attention","sliding_attention","full_attention"],
        "num_sliding_attention_heads":6,"per_layer_config":{"1":{"num_attention_heads":6}},"rope_parameters":{
        "full_attention":{"rope_type":"default","rope_theta":5000000.0,"partial_rotary_factor":0.5},
        "sliding_attention":{"rope_type":"default","rope_theta":10000.0,"partial_rotary_factor":1.0}}"#;
    let (hub, saved) = (read(hub).unwrap(), read(saved).unwrap());
    assert_eq!(hub.layers, saved.layers);
    assert_eq!(
        hub.layers.iter().map(|own| (own.n_q_heads, own.n_kv_heads)).collect::<Vec<_>>(),
        [(4, 2), (6, 2), (4, 2)]
    );
    let turned = |layer: usize| hub.layers[layer].rope.as_ref().unwrap().rotary_dim;
    assert_eq!([turned(0), turned(1), turned(2)], [8, 16, 8]);
    for (extra, named) in [
        (r#","rope_theta":[5000000.0,10000.0]"#, "`rope_theta`"),
        (r#","rope_theta":[5000000.0,10000.0,10000.0]"#, "`rope_theta`"),
        (r#","attention_other_setting":{"head_dim":32}"#, "`head_dim`"),
        (r#","per_layer_config":{"1":{"head_dim":32}}"#, "`per_layer_config`"),
        (r#","use_rope_layers":[true,false,true]"#, "`use_rope_layers`"),
    ] {
        let error = read(extra).unwrap_err();
        assert!(error.to_string().contains(named), "{error}");
    }
}
