//! Keeps the workers of a pool on CPUs of their own.
//!
//! Where no CPU is idle, the kernel puts a thread that is woken on its waker's CPU, or where it ran before. It then
//! evens out how many threads CPUs have, but slowly, and not where two of ours share one CPU and each other one has
//! one thread of somebody else's. Two workers on a virtual machine with two busy CPUs were found to clear 4 GiB in
//! turn on one of them, each time, at half the speed of threads that were new (Linux 6.18).
//! So a worker takes a seat on its CPU before each chunk, and moves to a CPU that is free if another one of us sits
//! there. To the kernel it may still go wherever it might when it began; while somebody has taken CPUs away from it,
//! it stays where it is ([`Bounds`]).
//!
//! Nothing but speed hangs on a seat, so this is no protocol between threads, and there is no model of it. A seat is
//! one word, changed by compare-and-exchange from nobody to a worker and by that worker back: it has one owner at a
//! time, and is taken from it only when somebody stands in for it. No memory is handed over with it, so `Relaxed` will
//! do. It can be wrong about the world: the kernel moves its owner between two chunks, or its owner is stuck in a page
//! fault. Then another worker moves without need, or shares a CPU until one of its next chunks; what it clears, and
//! how, is the same on any CPU.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::sys::{Bounds, current_cpu};
use crate::topology::Topology;

/// Who sits on which CPU. Not exact, as threads are moved between two looks.
#[derive(Debug)]
pub(super) struct Seats {
    /// By CPU: one more than the worker's number, 0 where nobody sits.
    by_cpu: Vec<AtomicU32>,
}

/// One worker's seat.
#[derive(Debug, Default)]
pub(super) struct Seat {
    cpu: Option<u32>,
    moved: Option<Instant>,
    /// Where it may sit: what its thread was told before it first worked.
    pub(super) bounds: Option<Bounds>,
}

impl Seat {
    /// How long a worker stays where it is, if the kernel puts it back or there is no room.
    const PAUSE: Duration = Duration::from_millis(10);

    /// Those of the calling thread, whose seat it is.
    pub(super) fn bounds(&mut self) -> &mut Bounds {
        self.bounds.get_or_insert_with(Bounds::of_current_thread)
    }
}

impl Seats {
    pub(super) fn new(topology: &Topology) -> Self {
        let cpus = topology.nodes().iter().flat_map(|node| node.allowed_cpus());
        let count = cpus.max().map_or(0, |last| *last as usize + 1);
        Self { by_cpu: (0..count).map(|_| AtomicU32::new(0)).collect() }
    }

    /// Seats a worker on the CPU that it runs on, or moves it to one where nobody sits.
    pub(super) fn settle(&self, worker: usize, seat: &mut Seat) {
        let Some(cpu) = current_cpu() else { return };
        if seat.cpu == Some(cpu) {
            return;
        }
        self.stand_up(worker, seat);
        if self.take(cpu, worker) {
            seat.cpu = Some(cpu);
            return;
        }
        if seat.moved.is_some_and(|moved| moved.elapsed() < Seat::PAUSE) {
            return;
        }
        match seat.bounds().move_current_thread(|cpu| self.is_free(cpu)) {
            Ok(_) => seat.cpu = current_cpu().filter(|cpu| self.take(*cpu, worker)),
            Err(error) => {
                tracing::debug!(worker, %error, "a worker shares a CPU with another one, and cannot be moved");
            }
        }
        seat.moved = Some(Instant::now());
    }

    /// Takes a seat if it is free; a CPU that is not known has room for everybody.
    fn take(&self, cpu: u32, worker: usize) -> bool {
        let Some(seat) = self.by_cpu.get(cpu as usize) else { return true };
        seat.compare_exchange(0, worker as u32 + 1, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn is_free(&self, cpu: u32) -> bool {
        self.by_cpu.get(cpu as usize).is_none_or(|seat| seat.load(Ordering::Relaxed) == 0)
    }

    /// Gives away the seat of a worker that is stuck.
    pub(super) fn vacate(&self, worker: usize) {
        self.by_cpu.iter().for_each(|seat| leave(seat, worker));
    }

    /// Before a worker sleeps or leaves.
    pub(super) fn stand_up(&self, worker: usize, seat: &mut Seat) {
        if let Some(place) = seat.cpu.take().and_then(|cpu| self.by_cpu.get(cpu as usize)) {
            leave(place, worker);
        }
    }
}

/// Frees a seat if it is this worker's.
fn leave(seat: &AtomicU32, worker: usize) {
    let _ = seat.compare_exchange(worker as u32 + 1, 0, Ordering::Relaxed, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seats(cpus: usize) -> Seats {
        Seats { by_cpu: (0..cpus).map(|_| AtomicU32::new(0)).collect() }
    }

    #[test]
    fn one_worker_a_seat() {
        let seats = seats(2);
        assert!(seats.take(0, 7) && !seats.take(0, 8) && seats.take(1, 8));
        let on_the_first = || Seat { cpu: Some(0), ..Seat::default() };
        seats.stand_up(8, &mut on_the_first());
        assert!(!seats.take(0, 8), "nobody takes another one's seat away");
        let mut own = on_the_first();
        seats.stand_up(7, &mut own);
        assert_eq!(own.cpu, None);
        assert!(seats.take(0, 8));
        assert!(seats.take(2, 7) && seats.take(2, 8), "a CPU that came later");
    }

    /// Whoever stands in for a stuck worker may have its seat, and only its.
    #[test]
    fn a_stuck_worker_gives_its_seat_away() {
        let seats = seats(3);
        assert!(seats.take(0, 7) && seats.take(1, 8));
        seats.vacate(7);
        assert!(seats.is_free(0) && !seats.is_free(1));
        assert!(seats.take(0, 9));
        // It comes back: the seat is another one's by now.
        let mut own = Seat { cpu: Some(0), ..Seat::default() };
        seats.stand_up(7, &mut own);
        assert!(own.cpu.is_none() && !seats.is_free(0));
    }

    /// Workers that begin on one CPU end on CPUs of their own, and may go where they might before.
    #[test]
    fn who_finds_the_seat_taken_moves() {
        std::thread::spawn(|| {
            let seats = seats(4096);
            let own = crate::sys::allowed_cpus().unwrap();
            let mut first = Seat::default();
            // Not, if the kernel moves this thread just then.
            let moved = (0..100).any(|_| {
                let mut second = Seat::default();
                seats.stand_up(1, &mut first);
                seats.settle(1, &mut first);
                seats.settle(2, &mut second);
                let taken = second.cpu;
                seats.stand_up(2, &mut second);
                second.moved.is_some() && taken != first.cpu && taken == current_cpu()
            });
            assert!(moved || own.len() == 1, "on one CPU there is nowhere to go");
            assert_eq!(crate::sys::allowed_cpus().unwrap(), own);
        })
        .join()
        .unwrap();
    }
}
