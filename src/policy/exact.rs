//! f32 in JSON without losing infinities and NaN, which are written as words.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Number {
    Finite(f32),
    Word(String),
}

impl Number {
    fn new(x: f32) -> Self {
        if x.is_finite() { Self::Finite(x) } else { Self::Word(x.to_string()) }
    }

    fn value(self) -> Result<f32, String> {
        match self {
            Self::Finite(x) => Ok(x),
            Self::Word(word) => match word.as_str() {
                "inf" => Ok(f32::INFINITY),
                "-inf" => Ok(f32::NEG_INFINITY),
                "NaN" => Ok(f32::NAN),
                _ => Err(format!("{word} is no number")),
            },
        }
    }
}

pub fn serialize<S: Serializer>(x: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    Number::new(*x).serialize(serializer)
}

pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f32, D::Error> {
    Number::deserialize(deserializer)?.value().map_err(D::Error::custom)
}

/// The same for rows.
pub mod row {
    use super::Number;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(row: &[f32], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(row.iter().map(|x| Number::new(*x)))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
        let row = Vec::<Number>::deserialize(deserializer)?;
        row.into_iter().map(|x| x.value().map_err(D::Error::custom)).collect()
    }
}
