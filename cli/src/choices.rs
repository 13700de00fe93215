//! Enums of the libraries as values of options, by their own names.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// One of `all`, by its name.
pub fn one_of<T: Copy + Send + Sync + 'static>(
    all: &'static [T],
    name: fn(T) -> &'static str,
    about: fn(T) -> Option<&'static str>,
) -> impl TypedValueParser<Value = T> {
    let values = all.iter().map(|&one| PossibleValue::new(name(one)).help(about(one)));
    PossibleValuesParser::new(values)
        .map(move |text| *all.iter().find(|&&one| name(one) == text).expect("one of the possible values"))
}
