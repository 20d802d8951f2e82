//! How fast it could be done at best.
//!
//! Both bounds are of fluid schedules: work is divisible without end, nothing costs anything but the clearing,
//! and everything is known beforehand. With `M` the bytes on a node, `B` the bandwidth of its memory, `L` what all
//! its workers store to their own memory together, `p(h, n)` how much slower a worker of `h` stores to `n`:
//!
//! - **local only**: no node's memory is cleared faster than it takes, so `T >= M / B`; and the workers of each
//!   node clear it, and the memory of the nodes without CPUs that they serve: `T >= (M + sum of M' p) / L`.
//! - **anywhere**: `T >= M / B` again. In a time `T` the workers of a node clear at most `L T` of its memory, so
//!   that `R = max(0, M - L T)` is left to remote workers, at most `link T`; all of these have
//!   `max(0, L T - M)` to spare on each node. A remote byte costs the workers of `h` at least `p(h)`, the least of
//!   `p(h, n)` over the other nodes `n` that hold memory, and one of node `n` costs anybody at least `q(n)`, the
//!   least of `p(h, n)` over the other nodes `h` with workers. So both `sum of R <= sum of max(0, L T - M) / p` and
//!   `sum of R q <= sum of max(0, L T - M)`; the bound is the least such `T`. (Clearing own memory first is best, as
//!   `p >= 1`.) It can be kept exactly where all memory is on one node; elsewhere it may be less than any schedule
//!   reaches, as far as nodes that need help are not near to all that can give it.
//!
//! A background rate bounds both: `T >= bytes / rate`, but for the last chunk, which is paid for when it begins.
//!
//! The workers are the pool's: threads that are bound to nothing may find CPUs that have more time.

use crate::host::Host;
use crate::machine::Plan;

/// Seconds that no schedule beats.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ideal {
    /// Workers clear memory of their own node, and of the nodes without CPUs that they serve.
    pub local: f64,
    /// Workers clear any memory.
    pub anywhere: f64,
}

pub fn ideal(host: &Host, plan: &Plan, bytes: &[u64], rate: Option<u64>) -> Ideal {
    let bytes: Vec<f64> = bytes.iter().map(|bytes| *bytes as f64).collect();
    let rated = rate.map_or(0.0, |rate| bytes.iter().sum::<f64>() / rate as f64);
    let memory = (0..host.nodes()).map(|node| bytes[node] / host.bandwidth(node)).fold(rated, f64::max);
    // Bytes a second of the workers of each node, to their own memory.
    let mut own = vec![0.0; host.nodes()];
    for hand in &host.workers {
        own[hand.node] += host.pace(*hand, hand.node).most;
    }
    let mut work = vec![0.0; host.nodes()];
    let mut local = memory;
    for (node, bytes) in bytes.iter().enumerate().filter(|(_, bytes)| **bytes > 0.0) {
        let home = plan.homes().get(plan.place_for(host.id(node))).and_then(|home| host.index(home.0).ok());
        let server = home.unwrap_or(node);
        work[server] += bytes * host.penalty(server, node);
        if server != node {
            local = local.max(bytes / host.speeds.link);
        }
    }
    local = work
        .iter()
        .zip(&own)
        .filter(|(work, _)| **work > 0.0)
        .map(|(work, own)| work / own)
        .fold(local, f64::max);
    Ideal { local, anywhere: anywhere(host, &bytes, &own, memory, local) }
}

fn anywhere(host: &Host, bytes: &[f64], own: &[f64], least: f64, enough: f64) -> f64 {
    let nodes = || 0..host.nodes();
    let cheapest = |penalties: &mut dyn Iterator<Item = f64>| penalties.fold(f64::INFINITY, f64::min);
    let holds = |node: &usize| bytes[*node] > 0.0;
    let works = |node: &usize| own[*node] > 0.0;
    let giving = |helper: usize| {
        cheapest(
            &mut nodes().filter(holds).filter(|node| *node != helper).map(|node| host.penalty(helper, node)),
        )
    };
    let getting = |node: usize| {
        cheapest(
            &mut nodes()
                .filter(works)
                .filter(|helper| *helper != node)
                .map(|helper| host.penalty(helper, node)),
        )
    };
    let giving: Vec<f64> = nodes().map(giving).collect();
    let getting: Vec<f64> = nodes().map(getting).collect();
    let is_enough = |time: f64| {
        let (mut left, mut cost, mut spare, mut help) = (0.0, 0.0, 0.0, 0.0);
        for node in nodes() {
            let rest = bytes[node] - own[node] * time;
            if rest > host.speeds.link * time {
                return false;
            }
            if rest > 0.0 {
                (left, cost) = (left + rest, cost + rest * getting[node]);
            } else {
                (spare, help) = (spare - rest, help - rest / giving[node]);
            }
        }
        left <= help && cost <= spare
    };
    if is_enough(least) {
        return least;
    }
    let (mut short, mut enough) = (least, enough);
    for _ in 0..100 {
        let middle = short + (enough - short) / 2.0;
        if is_enough(middle) { enough = middle } else { short = middle }
    }
    short
}
