//! Options whose values are names of the library.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use sigmascale::names::Named;

/// The parser of an option whose value is one of `T`'s.
pub fn named<T: Named>() -> impl TypedValueParser<Value = T> {
    let value = |value: &T| PossibleValue::new(value.name()).help(value.help());
    PossibleValuesParser::new(T::VALUES.iter().map(value)).try_map(|name| T::named(&name))
}
