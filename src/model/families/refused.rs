//! Model types and settings that have no bound, each with the reason.

use super::schema::{Refusal, Setting};

/// Model types that are known and cannot be bounded, each with the reason.
pub(crate) static REFUSED: &[(&str, &str)] = &[
    ("axk2", GATED_LATENT),
    ("deepseek_v4", POOLED_KEYS),
    ("glm5_next", NO_SHARED_KEY),
    ("dots3_note", NORMED_KEY),
    ("dots3_note_text", NORMED_KEY),
    ("glm5_next_text", NO_SHARED_KEY),
    ("mistral_large4", SHARED_LATENT),
    ("mistral_large4_text", SHARED_LATENT),
    ("bloom", ALIBI),
    ("mpt", ALIBI),
    ("t5", RELATIVE),
    ("mt5", RELATIVE),
    ("umt5", RELATIVE),
    ("deberta", RELATIVE),
    ("deberta-v2", RELATIVE),
    ("mpnet", RELATIVE),
    ("xlnet", RELATIVE),
    ("gemma4_assistant", OTHER_MODEL),
    ("gemma4_unified_assistant", OTHER_MODEL),
    ("mimo_v2", NARROW_VALUES),
    ("mimo_v2_flash", NARROW_VALUES),
];

const GATED_LATENT: &str = "its queries also read the query latent without its norm, which has no bound";
const POOLED_KEYS: &str = "one normalized row is key and value of all heads, and two more caches hold gated sums of rows, which have no \
                           bound here";
const NO_SHARED_KEY: &str = "its cached row is a latent alone, without the shared key that the bounds of MLA read";
const NORMED_KEY: &str = "its latent attention also normalizes the shared rotated key, and its layers differ in size";
const SHARED_LATENT: &str = "some of its layers read the cached latents of earlier layers";
const ALIBI: &str = "ALiBi adds a position bias to the logits";
const NARROW_VALUES: &str =
    "its values are narrower than its keys, while scales and operators here have one width a head for both";
const OTHER_MODEL: &str = "it reads the keys and values of the model that it drafts for";
const RELATIVE: &str = "relative position terms are added to the logits";

/// Settings refused in every family.
pub(crate) static COMMON_REFUSALS: &[Refusal] = &[
    Refusal { key: "alibi", unless: Setting::False, why: "ALiBi adds a position bias to the logits" },
    Refusal { key: "use_alibi", unless: Setting::False, why: "ALiBi adds a position bias to the logits" },
    Refusal {
        key: "use_logn_attn",
        unless: Setting::False,
        why: "the query is multiplied by a factor that grows with the position",
    },
    Refusal { key: "use_mrope", unless: Setting::False, why: "rotation by several position axes is not supported" },
];

/// Settings of one DeciLM block's attention that no bound here covers.
pub(crate) static BLOCK_REFUSALS: &[Refusal] = &[
    Refusal {
        key: "sparsify",
        unless: Setting::False,
        why: "it leaves out parts of the projections, which is not supported",
    },
    Refusal { key: "mamba", unless: Setting::False, why: "a state-space block in place of attention is not supported" },
    Refusal {
        key: "llama4",
        unless: Setting::False,
        why: "its query is multiplied by a factor that grows with the position",
    },
];
