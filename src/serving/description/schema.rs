//! The rows of an engine's description.

/// One engine.
pub(crate) struct Description {
    /// Versions that the tables were taken from.
    pub version: &'static str,
    /// Which of q, k and v it casts with a scale of a checkpoint.
    pub operands: [bool; 3],
    /// Why the others are cast at 1.0.
    pub without: Option<&'static str>,
    /// Whether every rename that fits is applied, one after the other; else only the first.
    pub every_rename: bool,
    /// Methods of quantization, by its key; what is not listed is unknown.
    pub methods: &'static [(&'static str, Carries)],
    /// Whether it compares ModelOpt's algorithm in upper case.
    pub upper_case: bool,
    /// Whether `hf_quant_config.json` counts only with ModelOpt as its producer.
    pub needs_producer: bool,
    /// Families, or model types, by name; what is not listed is unknown.
    pub families: &'static [(&'static [&'static str], Loads)],
    /// Why latent attention has no scales.
    pub latent: &'static str,
    /// Whether layers can be left out of the FP8 cache when the server starts.
    pub skips_layers: bool,
    /// Families whose class gives each layer the window that the config does; else a window counts where all layers have it.
    pub windows: &'static [&'static str],
    /// Families with which it does not start where a stored scale has no parameter; `*` for all, but for latent attention.
    pub stops_for: &'static [&'static str],
    /// Parameters of latent attention that take a scale of its own, whether or not the cache is written with it.
    pub latent_names: Option<Names>,
    /// Keys of a config by which it computes attention otherwise than the bounds do.
    pub otherwise: &'static [Otherwise],
    /// Keys of the rotation's settings that it reads in some classes only: the larger factor counts.
    pub unread: &'static [&'static str],
    /// Whether FP8 weights with scales of their own are brought to a common or a coarser scale when they are loaded.
    pub requantizes: bool,
}

/// A key of the config, of the text model or of a rotation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Otherwise {
    /// The key.
    pub key: &'static str,
    /// The number that changes nothing; null, false, and an absent key never do.
    pub neutral: Option<f64>,
    /// What it does.
    pub why: &'static str,
}

/// Keys that change the rotation's class.
pub(crate) const ROTATIONS: [Otherwise; 2] = [
    otherwise("use_fope", None, "rotates by sums of waves with learned coefficients"),
    otherwise("rope_dim", None, "rotates another number of channels"),
];

/// A key that changes what is computed unless it has this number.
pub(crate) const fn otherwise(key: &'static str, neutral: Option<f64>, why: &'static str) -> Otherwise {
    Otherwise { key, neutral, why }
}

/// Whether a method of quantization gives attention parameters for scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Carries {
    /// Always.
    Always,
    /// By the `kv_cache_scheme` of compressed-tensors.
    Scheme,
    /// Where the settings ask for an FP8 cache.
    Asked,
    /// Where Quark's `exclude` does not match the module.
    NotExcluded,
    /// Never.
    Never(&'static str),
}

/// What the attention of a family loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loads {
    /// A parameter an operand.
    Scales(Names),
    /// Nothing: the cast is at 1.0.
    Nothing(&'static str),
    /// In some layers the scale, in others nothing, and which is not known here: both are judged.
    Partly(Names, &'static str),
}

/// How parameters of attention are called, from the attention module of the checkpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names {
    /// The module that holds the parameter `k_scale`: `{module}` is the checkpoint's, `{layer}` what holds that.
    pub parameter: &'static str,
    /// The same for the name that is written.
    pub written: &'static str,
    /// Renames of stored names.
    pub renames: &'static [Rename],
}

impl PartialEq for Names {
    fn eq(&self, other: &Self) -> bool {
        (self.parameter, self.written, self.renames.len()) == (other.parameter, other.written, other.renames.len())
    }
}

impl Eq for Names {}

/// A rename of stored names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rename {
    /// A regular expression, found anywhere in a name.
    pub from: &'static str,
    /// What replaces it.
    pub to: &'static str,
    /// Not where this precedes it.
    pub not_behind: &'static str,
    /// Only for these methods; empty: for all.
    pub methods: &'static [&'static str],
}

/// A rename for every method.
pub(crate) const fn rename(from: &'static str, to: &'static str) -> Rename {
    Rename { from, to, not_behind: "", methods: &[] }
}
