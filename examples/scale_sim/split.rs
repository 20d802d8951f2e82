//! What peers do: equal shares, one a thread, decided beforehand.
//!
//! QEMU (`util/oslib-posix.c`, `MAX_MEM_PREALLOC_THREAD_COUNT`) and Cloud Hypervisor (`prefault`) start 16 threads
//! at most and let the scheduler place them. Here they get all regions at once, as one run of bytes in equal
//! shares, and starting them costs nothing: kinder than region after region.

use crate::agenda::Agenda;
use crate::host::{Hand, Host};
use crate::layout::{Layout, Runs, mixed};
use crate::run::Run;

/// As many threads as peers start.
pub const CAP: usize = 16;

/// Where the scheduler puts threads that are bound to nothing: each on a CPU of its own, anywhere; not on one that
/// is short of time, as long as there are others.
pub fn unpinned(host: &Host, threads: usize, seed: u64) -> Vec<Hand> {
    let mut cpus: Vec<(u64, Hand)> = host
        .cpus()
        .into_iter()
        .enumerate()
        .map(|(cpu, hand)| (mixed(seed ^ mixed(cpu as u64)), hand))
        .collect();
    cpus.sort_by(|a, b| b.1.share.total_cmp(&a.1.share).then(a.0.cmp(&b.0)));
    cpus.into_iter().map(|(_, hand)| hand).cycle().take(threads).collect()
}

/// One thread for each worker of the pool, on the same CPUs: each gets one of the node that its share begins
/// on, or the nearest that is left.
pub fn pinned(host: &Host, layout: &Layout) -> Vec<Hand> {
    let mut free = host.workers.clone();
    let threads = free.len();
    let shares = (0..threads).map(|thread| share(layout.bytes(), threads, thread));
    shares
        .filter_map(|(from, _)| {
            let node = layout.runs(from, from + 1).next().map_or(0, |(node, _)| node);
            let nearest = (0..free.len()).min_by(|a, b| {
                let far = |index: usize| host.penalty(free[index].node, node);
                let other = |index: usize| free[index].node != node;
                other(*a).cmp(&other(*b)).then(far(*a).total_cmp(&far(*b)))
            })?;
            Some(free.remove(nearest))
        })
        .collect()
}

fn share(bytes: u64, threads: usize, thread: usize) -> (u64, u64) {
    let at = |thread: usize| (u128::from(bytes) * thread as u128 / threads as u128) as u64;
    (at(thread), at(thread + 1))
}

pub fn clear(host: &Host, layout: &Layout, hands: &[Hand], name: &str) -> Run {
    let mut run = Run::new(name, host.nodes());
    run.threads = hands.len();
    let mut memories = host.memories();
    let mut agenda: Agenda<(usize, u64)> = Agenda::new();
    let mut shares: Vec<Runs<'_>> = (0..hands.len())
        .map(|thread| share(layout.bytes(), hands.len(), thread))
        .map(|(from, to)| layout.runs(from, to))
        .collect();
    // What each thread clears now.
    let mut at_hand = vec![0; hands.len()];
    let mut begin = |thread: usize, now: f64, memories: &mut [crate::memory::Memory], at_hand: &mut [u64]| {
        let (node, bytes) = shares[thread].next()?;
        at_hand[thread] = bytes;
        memories[node].begin(now, thread, host.pace(hands[thread], node), bytes);
        Some(node)
    };
    let begun: Vec<usize> =
        (0..hands.len()).filter_map(|thread| begin(thread, 0.0, &mut memories, &mut at_hand)).collect();
    let mut changed = begun;
    loop {
        changed.sort_unstable();
        changed.dedup();
        for node in changed.drain(..) {
            if let Some((at, version)) = memories[node].next() {
                agenda.enter(at, (node, version));
            }
        }
        let Some((now, (node, version))) = agenda.next() else { return run };
        let Some(thread) = memories[node].finish(now, version) else { continue };
        run.cleared(node, hands[thread].node == node, at_hand[thread], now);
        changed.push(node);
        changed.extend(begin(thread, now, &mut memories, &mut at_hand));
    }
}
