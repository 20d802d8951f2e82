//! Which CPUs threads may run on: `sched_getaffinity(2)` and `sched_setaffinity(2)` with masks of any size.

use std::io;

/// The kernel's masks are arrays of `unsigned long`.
type Word = libc::c_ulong;
const WORD_BITS: usize = Word::BITS as usize;

/// The CPUs this process may run on, ascending: the affinity of its main thread, which the kernel keeps
/// inside the cpuset. The calling thread's own affinity plays no part unless it is the main thread.
///
/// # Errors
///
/// What `sched_getaffinity` answers, `EPERM` or `ENOSYS` in some sandboxes.
pub(crate) fn allowed_cpus() -> io::Result<Vec<u32>> {
    // The main thread's id is the process's id.
    // SAFETY: getpid takes nothing, cannot fail and has no side effects.
    affinity_of(unsafe { libc::getpid() })
}

/// The affinity of one thread; 0 stands for the calling thread.
fn affinity_of(thread: libc::pid_t) -> io::Result<Vec<u32>> {
    // Enough for 1024 CPUs, as many as the fixed `cpu_set_t` holds.
    affinity_from(thread, 1024 / WORD_BITS)
}

/// The same, asking with a mask of `words` first. The kernel answers EINVAL while its own mask is longer
/// (it may have 8192 CPUs); a million is where we stop asking.
fn affinity_from(thread: libc::pid_t, words: usize) -> io::Result<Vec<u32>> {
    let mut mask: Vec<Word> = vec![0; words];
    loop {
        // SAFETY: the kernel writes at most the given number of bytes, which is the length of `mask`;
        // `mask` lives and is not otherwise used during the call. Only its start is typed `cpu_set_t`;
        // no reference to that (perhaps longer) type is made.
        let result = unsafe {
            libc::sched_getaffinity(thread, size_of_val(mask.as_slice()), mask.as_mut_ptr().cast())
        };
        if result == 0 {
            break;
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINVAL) || mask.len() * WORD_BITS >= 1 << 20 {
            return Err(error);
        }
        mask.resize(mask.len() * 2 + 1, 0);
    }
    let words = mask.iter().zip((0u32..).step_by(WORD_BITS));
    Ok(words
        .flat_map(|(word, base)| {
            (0..Word::BITS).filter(move |bit| word >> bit & 1 == 1).map(move |bit| base + bit)
        })
        .collect())
}

/// Lets the calling thread run on these CPUs only. The kernel intersects them with the cpuset.
///
/// # Errors
///
/// What `sched_setaffinity` answers: `EINVAL` when none of the CPUs is in the cpuset (or the list is
/// empty), `EPERM` in some sandboxes. The thread's affinity is then as before.
pub(crate) fn pin_current_thread(cpus: &[u32]) -> io::Result<()> {
    let words = cpus.iter().max().map_or(0, |last| *last as usize / WORD_BITS + 1);
    let mut mask: Vec<Word> = vec![0; words.max(1)];
    for cpu in cpus {
        mask[*cpu as usize / WORD_BITS] |= 1 << (*cpu as usize % WORD_BITS);
    }
    // SAFETY: the kernel reads at most the given number of bytes, which is the length of `mask`, and
    // takes bits beyond them as zero; `mask` lives during the call. 0 is the calling thread.
    let result = unsafe { libc::sched_setaffinity(0, size_of_val(mask.as_slice()), mask.as_ptr().cast()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The CPU that the calling thread is on at this moment.
pub(crate) fn current_cpu() -> Option<u32> {
    // SAFETY: takes nothing and changes nothing.
    u32::try_from(unsafe { libc::sched_getcpu() }).ok()
}

/// The CPUs that a thread moves among.
///
/// Remembered here because the kernel would not: while the cpuset is smaller, a thread is found as narrow as that, and
/// what it is set to then is all that it gets back when the cpuset is widened (since Linux 6.2; before, the kernel
/// forgets in any case).
#[derive(Debug, Default)]
pub(crate) struct Bounds {
    /// What the thread was told, ascending.
    told: Vec<u32>,
    /// What it was set to last; less than `told` if it moved while it might use no more.
    set: Vec<u32>,
}

impl Bounds {
    /// The CPUs that the calling thread may use at this moment; none, and no move, where it cannot be asked.
    pub(crate) fn of_current_thread() -> Self {
        let told = affinity_of(0).unwrap_or_default();
        Self { set: told.clone(), told }
    }

    /// What it may use now, of what it was told: what it has, and what it would have, had it not moved while the
    /// process might use less than the `allowed` CPUs.
    fn now(&mut self, own: &[u32], allowed: &[u32]) -> Vec<u32> {
        let is_in = |cpus: &[u32], cpu: &u32| cpus.binary_search(cpu).is_ok();
        let is_explained = self.set.iter().all(|cpu| is_in(own, cpu) || !is_in(allowed, cpu));
        if !is_explained {
            // Not the process has less, but this thread: somebody told it so.
            self.told = own.to_vec();
        }
        self.told.iter().copied().filter(|cpu| is_in(own, cpu) || is_in(allowed, cpu)).collect()
    }

    /// Moves the calling thread, whose bounds these are, to the first of its CPUs that `choose` takes, those after the
    /// present one first; `None` if it takes none. Afterwards the thread may go on to any of its CPUs.
    ///
    /// # Errors
    ///
    /// As [`pin_current_thread`], with the CPU that `choose` had taken.
    pub(crate) fn move_current_thread(
        &mut self,
        mut choose: impl FnMut(u32) -> bool,
    ) -> Result<Option<u32>, (io::Error, Option<u32>)> {
        let own = affinity_of(0).map_err(|error| (error, None))?;
        let now = self.now(&own, &allowed_cpus().unwrap_or_default());
        let (before, behind) = now.split_at(now.partition_point(|cpu| Some(*cpu) <= current_cpu()));
        let Some(cpu) = behind.iter().chain(before).copied().find(|cpu| choose(*cpu)) else {
            return Ok(None);
        };
        // The kernel moves a thread at once if it may not stay where it is.
        let mut set = |cpus: Vec<u32>| pin_current_thread(&cpus).map(|()| self.set = cpus);
        let moved = set(vec![cpu]).and_then(|()| set(now));
        moved.map(|()| Some(cpu)).map_err(|error| (error, Some(cpu)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_narrows_itself_only() {
        let before = allowed_cpus().unwrap();
        assert!(!before.is_empty());
        std::thread::spawn({
            let before = before.clone();
            move || {
                let inherited = affinity_of(0).unwrap();
                pin_current_thread(&inherited[..1]).unwrap();
                assert_eq!(affinity_of(0).unwrap(), inherited[..1]);
                assert_eq!(allowed_cpus().unwrap(), before, "the process's CPUs, not the thread's");
                pin_current_thread(&inherited).unwrap();
                assert_eq!(affinity_of(0).unwrap(), inherited);
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_that_moves_may_move_on() {
        std::thread::spawn(|| {
            let own = affinity_of(0).unwrap();
            let mut bounds = Bounds::of_current_thread();
            for wanted in own.iter().rev() {
                assert_eq!(bounds.move_current_thread(|cpu| cpu == *wanted).unwrap(), Some(*wanted));
                assert_eq!(affinity_of(0).unwrap(), own);
            }
            assert_eq!(bounds.move_current_thread(|_| false).unwrap(), None);
            // As narrow as a move under a smaller cpuset left it; the cpuset is what it was.
            pin_current_thread(&own[..1]).unwrap();
            bounds.set.truncate(1);
            let last = own[own.len() - 1];
            assert_eq!(bounds.move_current_thread(|cpu| cpu == last).unwrap(), Some(last));
            assert_eq!(affinity_of(0).unwrap(), own);
            // A thread that was told to use one CPU stays there.
            pin_current_thread(&own[..1]).unwrap();
            assert_eq!(bounds.move_current_thread(|_| true).unwrap(), Some(own[0]));
            assert_eq!((current_cpu(), affinity_of(0).unwrap()), (Some(own[0]), own[..1].to_vec()));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_thread_is_bound_by_what_it_was_told() {
        let bounds = |told: &[u32], set: &[u32]| Bounds { told: told.to_vec(), set: set.to_vec() };
        let all = [0, 1, 2, 3, 4, 5, 6, 7];
        for (case, set, own, allowed, now) in [
            ("nothing happened", &[2, 3, 4, 5][..], &[2, 3, 4, 5][..], &all[..], &[2, 3, 4, 5][..]),
            ("the cpuset is smaller", &[2, 3, 4, 5], &[2, 3], &[0, 1, 2, 3], &[2, 3]),
            ("and so it was at the last move", &[2, 3], &[2, 3], &[0, 1, 2, 3], &[2, 3]),
            ("it was at the last move, and is no more", &[2, 3], &[2, 3], &all, &[2, 3, 4, 5]),
            ("it is another one", &[2, 3], &[4, 5], &[4, 5, 6, 7], &[4, 5]),
            ("this thread was told to use less", &[2, 3, 4, 5], &[3], &all, &[3]),
            ("or something else", &[2, 3, 4, 5], &[6, 7], &all, &[6, 7]),
            ("the kernel forgot what it was told", &[2, 3, 4, 5], &all, &all, &[2, 3, 4, 5]),
            ("the main thread bound itself", &[2, 3, 4, 5], &[2, 3, 4, 5], &[0], &[2, 3, 4, 5]),
            ("to one of them", &[2, 3, 4, 5], &[2, 3, 4, 5], &[2], &[2, 3, 4, 5]),
            ("what the process may use is not known", &[2, 3, 4, 5], &[2, 3], &[], &[2, 3]),
            ("a move was broken off", &[4], &[4], &all, &[2, 3, 4, 5]),
        ] {
            assert_eq!(bounds(&[2, 3, 4, 5], set).now(own, allowed), now, "{case}");
        }
        // What it was told it remembers.
        let mut bounds = bounds(&[2, 3, 4, 5], &[2, 3, 4, 5]);
        assert_eq!(bounds.now(&[3], &all), [3]);
        bounds.set = vec![3];
        assert_eq!(bounds.now(&[3], &all), [3]);
    }

    #[test]
    fn a_mask_too_short_for_the_machine_grows() {
        // No machine has so few CPUs that an empty mask would do.
        assert_eq!(affinity_from(0, 0).unwrap(), affinity_of(0).unwrap());
    }

    #[test]
    fn cpus_that_do_not_exist_are_refused_or_ignored() {
        std::thread::spawn(|| {
            let inherited = affinity_of(0).unwrap();
            for nothing in [&[][..], &[65_535]] {
                let error = pin_current_thread(nothing).unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
                assert_eq!(affinity_of(0).unwrap(), inherited, "left as it was");
            }
            pin_current_thread(&[inherited[0], 65_535]).unwrap();
            assert_eq!(affinity_of(0).unwrap(), inherited[..1]);
        })
        .join()
        .unwrap();
    }
}
