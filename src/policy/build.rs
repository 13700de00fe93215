//! Policies from their parameters, at their start or from a saved state.

use super::auto_c::AutoC;
use super::contract::Policy;
use super::current::Current;
use super::delayed::{DelayedPaper, DelayedTe};
use super::differs::differs;
use super::geometry::Geometry;
use super::shape::PolicyShape;
use super::table::{Memory, PolicyConfig, PolicyState, STATE_VERSION};
use crate::error::{Error, Result};

impl PolicyConfig {
    /// A policy at its start.
    ///
    /// # Errors
    /// `is_argument` if a parameter or the shape breaks its rule.
    ///
    /// ```
    /// use sigmascale::policy::{PolicyConfig, PolicyKind, PolicyShape};
    /// let shape = PolicyShape::new([(4, 2), (8, 4)]);
    /// let policy = PolicyConfig::from(PolicyKind::DelayedTe).build(shape)?;
    /// assert_eq!(policy.name(), "delayed-te");
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    pub fn build(&self, shape: PolicyShape) -> Result<Box<dyn Policy>> {
        shape.check()?;
        Ok(match self {
            Self::Geometry(config) => Box::new(Geometry::worst_case(*config, shape)?),
            Self::GeometryCStar(config) => Box::new(Geometry::c_star(*config, shape)?),
            Self::AutoC(config) => Box::new(AutoC::new(*config, shape)?),
            Self::DelayedPaper(config) => Box::new(DelayedPaper::new(*config, shape)?),
            Self::DelayedTe(config) => Box::new(DelayedTe::new(*config, shape)?),
            Self::Current(config) => Box::new(Current::new(*config, shape)),
        })
    }
}

impl PolicyState {
    /// The policy that this state was saved from.
    ///
    /// # Errors
    /// `is_mismatch` if the version, the parameters or the shape differ from what the caller expects (the message names
    /// what differs), or if the state's parts do not fit each other.
    pub fn restore(self, config: &PolicyConfig, shape: PolicyShape) -> Result<Box<dyn Policy>> {
        if self.version != STATE_VERSION {
            return Err(Error::mismatch(format_args!(
                "the policy state has version {}, this build reads {STATE_VERSION}",
                self.version
            )));
        }
        if self.config.kind() != config.kind() {
            return Err(Error::mismatch(format_args!(
                "the state was saved by policy {}, not {}",
                self.config.kind(),
                config.kind()
            )));
        }
        differs("policy shape", &self.shape, &shape)?;
        differs(config.kind().name(), &self.config, config)?;
        shape.check()?;
        match (config, self.memory) {
            (PolicyConfig::AutoC(config), Memory::AutoC(state)) => Ok(Box::new(AutoC::resume(*config, shape, state)?)),
            (PolicyConfig::DelayedPaper(config), Memory::DelayedPaper(state)) => {
                Ok(Box::new(DelayedPaper::resume(*config, shape, state)?))
            }
            (PolicyConfig::DelayedTe(config), Memory::DelayedTe(state)) => {
                Ok(Box::new(DelayedTe::resume(*config, shape, state)?))
            }
            (PolicyConfig::Geometry(_) | PolicyConfig::GeometryCStar(_) | PolicyConfig::Current(_), Memory::None) => {
                config.build(shape)
            }
            _ => Err(Error::mismatch(format_args!(
                "the state of policy {} holds another policy's memory",
                config.kind()
            ))),
        }
    }
}
