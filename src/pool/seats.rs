//! Keeps the workers of a pool on CPUs of their own.
//!
//! Where no CPU is idle, the kernel puts a thread that is woken on its waker's CPU, or where it ran before. It then
//! evens out how many threads CPUs have, but slowly, and not where two of ours share one CPU and each other one has
//! one thread of somebody else's. Two workers on a virtual machine with two busy CPUs were found to clear 4 GiB in
//! turn on one of them, each time, at half the speed of threads that were new (Linux 6.18).
//! So a worker takes a seat on its CPU before each chunk, and moves to a CPU that is free if another one of us sits
//! there. To the kernel it may still go wherever its node's workers may.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::sys::{current_cpu, move_current_thread};
use crate::topology::Topology;

/// Who sits on which CPU. Not exact, as threads are moved between two looks.
#[derive(Debug)]
pub(super) struct Seats {
    /// By CPU: one more than the worker's number, 0 where nobody sits.
    by_cpu: Vec<AtomicU32>,
}

/// One worker's seat.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seat {
    cpu: Option<u32>,
    moved: Option<Instant>,
}

impl Seat {
    /// How long a worker stays where it is, if the kernel puts it back or there is no room.
    const PAUSE: Duration = Duration::from_millis(10);
}

impl Seats {
    pub(super) fn new(topology: &Topology) -> Self {
        let cpus = topology.nodes().iter().flat_map(|node| node.allowed_cpus());
        let count = cpus.max().map_or(0, |last| *last as usize + 1);
        Self { by_cpu: (0..count).map(|_| AtomicU32::new(0)).collect() }
    }

    /// Seats a worker on the CPU that it runs on, or moves it to one where nobody sits.
    pub(super) fn settle(&self, worker: usize, seat: Seat) -> Seat {
        let Some(cpu) = current_cpu() else { return seat };
        if seat.cpu == Some(cpu) {
            return seat;
        }
        let seat = self.stand_up(worker, seat);
        if self.take(cpu, worker) {
            return Seat { cpu: Some(cpu), ..seat };
        }
        if seat.moved.is_some_and(|moved| moved.elapsed() < Seat::PAUSE) {
            return seat;
        }
        let cpu = move_current_thread(|cpu| self.take(cpu, worker)).unwrap_or_else(|(error, taken)| {
            tracing::debug!(worker, %error, "a worker shares a CPU with another one, and cannot be moved");
            self.stand_up(worker, Seat { cpu: taken, moved: None });
            None
        });
        Seat { cpu, moved: Some(Instant::now()) }
    }

    /// Takes a seat if it is free; a CPU that is not known has room for everybody.
    fn take(&self, cpu: u32, worker: usize) -> bool {
        let Some(seat) = self.by_cpu.get(cpu as usize) else { return true };
        seat.compare_exchange(0, worker as u32 + 1, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Before a worker sleeps or leaves.
    pub(super) fn stand_up(&self, worker: usize, seat: Seat) -> Seat {
        if let Some(place) = seat.cpu.and_then(|cpu| self.by_cpu.get(cpu as usize)) {
            let _ = place.compare_exchange(worker as u32 + 1, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
        Seat { cpu: None, ..seat }
    }
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
        seats.stand_up(8, Seat { cpu: Some(0), moved: None });
        assert!(!seats.take(0, 8), "nobody takes another one's seat away");
        assert_eq!(seats.stand_up(7, Seat { cpu: Some(0), moved: None }).cpu, None);
        assert!(seats.take(0, 8));
        assert!(seats.take(2, 7) && seats.take(2, 8), "a CPU that came later");
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
                first = seats.settle(1, seats.stand_up(1, first));
                let second = seats.settle(2, Seat::default());
                seats.stand_up(2, second);
                second.moved.is_some() && second.cpu != first.cpu && second.cpu == current_cpu()
            });
            assert!(moved || own.len() == 1, "on one CPU there is nowhere to go");
            assert_eq!(crate::sys::allowed_cpus().unwrap(), own);
        })
        .join()
        .unwrap();
    }
}
