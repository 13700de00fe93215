//! The class that engines build: they choose it by the config's `architectures`, while bounds follow from its `model_type`.

use super::settings::Settings;

/// Names of classes that are not those of their model types, without what follows `For`, in lower case; and the types with whose
/// attention they compute.
const OTHER_NAMES: &[(&str, &[&str])] = &[
    ("llama", &["mistral"]),
    ("mistral", &["llama"]),
    ("deepseekv3", &["kimi_k2"]),
    ("vllama3", &["llama"]),
    ("decilm", &["deci", "nemotron-nas"]),
    ("rw", &["falcon"]),
    ("hunyuandensev1", &["hunyuan_v1_dense"]),
    ("hunyuanmoev1", &["hunyuan_v1_moe"]),
    ("minimaxm3sparse", &["minimax_m3_vl", "minimax_m3_vl_text"]),
    ("bailingmoev25", &["bailing_hybrid"]),
];

/// The first class that the config names and that is not of its model types.
pub(super) fn other_class<'a>(config: &'a Settings, family: &str) -> Option<&'a str> {
    let types: Vec<&str> = config.types().into_iter().chain([family]).collect();
    let fits = |class: &&str| {
        let stem = stem(class);
        let other = OTHER_NAMES.iter().filter(|(name, _)| *name == stem).flat_map(|(_, types)| *types);
        types.iter().any(|own| plain(own) == stem) || other.into_iter().any(|other| types.contains(other))
    };
    config.architectures().into_iter().find(|class| !fits(class))
}

/// `GPTNeoXForCausalLM` as `gptneox`.
fn stem(class: &str) -> String {
    let end = class.match_indices("For").find(|(at, _)| class[at + 3..].starts_with(|c: char| c.is_ascii_uppercase()));
    let class = end.map_or(class, |(at, _)| &class[..at]);
    let class = class.strip_suffix("Model").unwrap_or(class);
    plain(class.strip_suffix("LMHead").unwrap_or(class))
}

/// A name in lower case, without signs and without the word for the text part of a model.
fn plain(name: &str) -> String {
    let name: String = name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase();
    name.strip_suffix("text").map(str::to_owned).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn classes_are_known_by_their_model_types() {
        let fits = |model_type: &str, class: &str| {
            let config = json!({"model_type": model_type, "architectures": [class]});
            other_class(&Settings { value: config.as_object().unwrap().clone() }, model_type).is_none()
        };
        for (model_type, class) in [
            ("llama", "LlamaForCausalLM"),
            ("llama", "LlamaForSequenceClassification"),
            ("gpt2", "GPT2LMHeadModel"),
            ("gpt_neox", "GPTNeoXForCausalLM"),
            ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
            ("gemma3_text", "Gemma3ForCausalLM"),
            ("aria_text", "AriaTextForCausalLM"),
            ("nemotron-nas", "DeciLMForCausalLM"),
            ("kimi_k2", "DeepseekV3ForCausalLM"),
            ("xlm-roberta", "XLMRobertaModel"),
        ] {
            assert!(fits(model_type, class), "{model_type} {class}");
        }
        for (model_type, class) in [
            ("llama", "GemmaForCausalLM"),
            ("qwen2", "Qwen3ForCausalLM"),
            ("gemma2", "Gemma3ForCausalLM"),
            ("llama", "For"),
        ] {
            assert!(!fits(model_type, class), "{model_type} {class}");
        }
    }
}
