//! The pool's own decisions: the very files that its workers run.

#![allow(dead_code, reason = "the pool asks for more than the simulator does")]

#[path = "../../src/pool/machine/grain.rs"]
mod grain;
#[path = "../../src/pool/machine/plan.rs"]
mod plan;
#[path = "../../src/pool/machine/quiet.rs"]
mod quiet;
#[path = "../../src/pool/machine/throttle.rs"]
mod throttle;

pub(crate) use grain::Grain;
pub(crate) use plan::{Locality, Origin, Place, Plan, Queues};
pub(crate) use quiet::Quiet;
pub(crate) use throttle::Throttle;
