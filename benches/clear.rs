//! Each method and the choice between them, by criterion. x86-64 Linux; as root for hugepages.
//!
//! For the one who changes a kernel: criterion keeps what it measured and says what became of it
//! (`--save-baseline`, `--baseline`). For comparing contestants with each other there is `speed`, where they
//! take turns; here each runs alone, and what else the machine did meanwhile is in its figure.
//!
//! - `clear/METHOD/SIZE`: pieces of cold memory, by each method of this CPU.
//! - `auto/cold/SIZE`: the same by the rule, with `Reuse::Cold`.
//! - `auto/hot/SIZE`: memory that this core's caches hold, by the rule, with `Reuse::Soon`.
//!
//! Cold pieces lie one after the other in a ring of twice the last cache the CPU shows: 128 MiB at least,
//! for two pieces of the largest size, and 256 MiB at most, because a shown cache may be a whole host's. Each
//! time round it is filled with 0xA5 by non-temporal stores, which leave no line in any cache, even where the
//! ring is the smaller of the two; nothing is cleared that is zero already. Hot pieces are filled by
//! ordinary stores right before. No filling is in the time.
//!
//! `cargo bench --bench clear`, under three minutes; with `-- 'clzero|auto'` only what matches.
//! Without `--bench` (`cargo test --benches`) each runs once, the largest pieces left out.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used, clippy::print_stderr)]

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    eprintln!("this bench fills memory by x86-64 stores; nothing was measured");
}

#[cfg(target_arch = "x86_64")]
#[path = "speed/memory.rs"]
#[allow(dead_code, reason = "the other bench uses the rest")]
mod memory;

#[cfg(target_arch = "x86_64")]
fn main() {
    cold_and_hot::run();
}

#[cfg(target_arch = "x86_64")]
mod cold_and_hot {
    use std::time::{Duration, Instant};

    use criterion::{BenchmarkId, Criterion, Throughput};
    use vm_zeroing::{Clearer, Concurrency, CpuDescription, HostRange, Reuse};

    use super::memory::{Hugepages, Memory, Pages, fill};

    const SIZES: [(&str, usize); 5] =
        [("4K", 4 << 10), ("64K", 64 << 10), ("1M", 1 << 20), ("4M", 4 << 20), ("64M", LARGEST)];
    const LARGEST: usize = 64 << 20;

    /// What is hot at a time where pieces are smaller: so much that reading the clock does not count, and no
    /// more than the second cache of any CPU.
    const HOT: usize = 256 << 10;

    /// The largest piece that a core's caches can be thought to hold.
    const HOT_AT_MOST: usize = 4 << 20;

    pub fn run() {
        let rehearsal = !std::env::args().any(|argument| argument == "--bench");
        let cpu = CpuDescription::detect();
        let shown = usize::try_from(cpu.llc_bytes.unwrap_or(0)).unwrap();
        let whole = shown.saturating_mul(2).clamp(2 * LARGEST, 256 << 20).next_multiple_of(LARGEST);
        // In debug builds the filling is slow.
        let (sizes, bytes) = if rehearsal { (&SIZES[..4], SIZES[3].1) } else { (&SIZES[..], whole) };
        let hugepages = if rehearsal { Err("a rehearsal".into()) } else { Hugepages::reserve(bytes as u64) };
        if let Err(reason) = &hugepages {
            eprintln!("NO HUGEPAGES ({reason}): on 4 KiB pages instead");
        }
        let pages = if hugepages.is_ok() { Pages::Huge2M } else { Pages::Anonymous4K };
        let mut ring = Ring::new(Memory::new(pages, bytes));
        eprintln!("last cache shown: {} MiB; ring: {} MiB, {}", shown >> 20, bytes >> 20, pages.name());

        // At most 49 benchmarks: two seconds each, and criterion's own arithmetic.
        let mut criterion = Criterion::default()
            .without_plots()
            .sample_size(20)
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_millis(1500))
            .nresamples(10_000)
            .configure_from_args();
        let mut methods = criterion.benchmark_group("clear");
        for method in cpu.methods() {
            let clearer = Clearer::with_method(method).unwrap();
            for &(name, size) in sizes {
                methods.throughput(Throughput::Bytes(size as u64));
                methods.bench_function(BenchmarkId::new(method.name(), name), |bencher| {
                    ring.restart();
                    bencher.iter_custom(|count| ring.clear_cold(&clearer, size, count));
                });
            }
        }
        methods.finish();

        let clearer = Clearer::auto();
        let mut auto = criterion.benchmark_group("auto");
        for (hint, reuse) in [("cold", Reuse::Cold), ("hot", Reuse::Soon)] {
            for &(name, size) in sizes {
                if reuse == Reuse::Soon && size > HOT_AT_MOST {
                    continue;
                }
                let method = clearer.method_for(size as u64, reuse, Concurrency::One);
                eprintln!("auto/{hint}/{name} is {method}");
                auto.throughput(Throughput::Bytes(size as u64));
                auto.bench_function(BenchmarkId::new(hint, name), |bencher| {
                    ring.restart();
                    bencher.iter_custom(|count| match reuse {
                        Reuse::Cold => ring.clear_cold(&clearer, size, count),
                        _ => ring.clear_hot(&clearer, size, count),
                    });
                });
            }
        }
        auto.finish();
        criterion.final_summary();
    }

    /// Memory that is cleared piece by piece, and filled again each time round.
    struct Ring {
        range: HostRange,
        start: usize,
        len: usize,
        /// Where the next piece begins. Behind it, all is filled and cold.
        next: usize,
    }

    impl Ring {
        fn new(memory: Memory) -> Self {
            let Memory { guest, start, len, .. } = memory;
            // SAFETY: the guest memory keeps it mapped and writable, and it is seen by raw pointers only.
            let range = unsafe { HostRange::new(start as *mut u8, len, guest) }.unwrap();
            Self { range, start, len, next: len }
        }

        /// The next piece is the first of a new round.
        fn restart(&mut self) {
            self.next = self.len;
        }

        /// Clears `count` pieces of cold memory; how long that took without the filling.
        fn clear_cold(&mut self, clearer: &Clearer, size: usize, count: u64) -> Duration {
            let (mut taken, mut left) = (Duration::ZERO, count);
            while left > 0 {
                if self.next + size > self.len {
                    fill(self.start, self.len);
                    self.next = 0;
                }
                let pieces = left.min(((self.len - self.next) / size) as u64);
                taken += self.clear(clearer, self.next, size, pieces, Reuse::Cold);
                self.next += size * pieces as usize;
                left -= pieces;
            }
            taken
        }

        /// The same with pieces that the caches hold.
        fn clear_hot(&mut self, clearer: &Clearer, size: usize, count: u64) -> Duration {
            let at_a_time = (HOT / size).max(1) as u64;
            let (mut taken, mut left) = (Duration::ZERO, count);
            while left > 0 {
                let pieces = left.min(at_a_time);
                fill_through_the_caches(self.start, size * pieces as usize);
                taken += self.clear(clearer, 0, size, pieces, Reuse::Soon);
                left -= pieces;
            }
            taken
        }

        /// Clears pieces one after the other, and looks at the last of them.
        fn clear(&self, clearer: &Clearer, at: usize, size: usize, pieces: u64, reuse: Reuse) -> Duration {
            let start = Instant::now();
            for piece in 0..pieces {
                clearer.clear(&self.range, at as u64 + piece * size as u64, size as u64, reuse).unwrap();
            }
            let taken = start.elapsed();
            let last = self.start + at + (pieces as usize - 1) * size;
            assert!(is_zero(last, size), "bytes are left that are not zero");
            taken
        }
    }

    fn fill_through_the_caches(start: usize, len: usize) {
        for at in (start..start + len).step_by(8) {
            // SAFETY: a part of the ring, whole words, in which nobody else works now. Volatile, or the
            // compiler would call a memset, which may take non-temporal stores.
            unsafe { (at as *mut u64).write_volatile(0xA5A5_A5A5_A5A5_A5A5) };
        }
    }

    /// As `memory::is_zero`, but a host range forbids references to its bytes.
    fn is_zero(start: usize, len: usize) -> bool {
        // SAFETY: a part of the ring, whole words, and nobody stores to it now.
        let word = |at: usize| unsafe { (at as *const u64).read() };
        (start..start + len)
            .step_by(512)
            .all(|block| (block..block + 512).step_by(8).fold(0, |seen, at| seen | word(at)) == 0)
    }
}
