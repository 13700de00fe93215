//! Enums whose values have names. One table gives the enum, serde, `ALL`, `name()` and `FromStr`, and through [`Named`]
//! the values that a command line offers.

use crate::error::{Error, Result};

/// A closed list of values with names. The names are the same in files, in results and on the command line.
pub trait Named: Copy + Send + Sync + 'static {
    /// What the values are, for messages: `policy`.
    const WHAT: &'static str;

    /// All values, in the order in which they are listed.
    const VALUES: &'static [Self];

    /// The name.
    fn name(self) -> &'static str;

    /// What the value means, in one line.
    fn help(self) -> &'static str;

    /// The value of this name.
    ///
    /// # Errors
    /// `is_argument` if there is none.
    fn named(name: &str) -> Result<Self> {
        Self::VALUES.iter().copied().find(|value| value.name() == name).ok_or_else(|| {
            let names = Self::VALUES.iter().map(|value| value.name()).collect::<Vec<_>>().join(", ");
            Error::argument(format_args!("unknown {} `{name}`: expected one of {names}", Self::WHAT))
        })
    }
}

/// Declares an enum by its table of names: see the module.
#[doc(hidden)]
#[macro_export]
macro_rules! named {
    ($(#[$meta:meta])* $vis:vis enum $Type:ident is $what:literal $(default $default:ident)? {
        $(#[doc = $first_line:literal] $(#[doc = $line:literal])* $Value:ident = $name:literal,)+
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ::serde::Serialize, ::serde::Deserialize)]
        $vis enum $Type {
            $(#[doc = $first_line] $(#[doc = $line])* #[serde(rename = $name)] $Value,)+
        }

        impl $Type {
            /// All values, in the order in which they are listed.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$Value),+];

            /// The name in files, in results and on the command line.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$Value => $name,)+
                }
            }
        }

        impl $crate::names::Named for $Type {
            const WHAT: &'static str = $what;
            const VALUES: &'static [Self] = &Self::ALL;

            fn name(self) -> &'static str {
                self.name()
            }

            fn help(self) -> &'static str {
                let text = match self {
                    $(Self::$Value => $first_line,)+
                };
                text.trim().trim_end_matches('.')
            }
        }

        $(impl Default for $Type {
            fn default() -> Self {
                Self::$default
            }
        })?

        impl ::std::str::FromStr for $Type {
            type Err = $crate::Error;

            fn from_str(name: &str) -> $crate::Result<Self> {
                <Self as $crate::names::Named>::named(name)
            }
        }
    };
}
