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

/// The CPUs that a thread moves among: those that it was told to use before it first moved.
#[derive(Debug, Default)]
pub(crate) struct Bounds {
    told: Vec<u32>,
    /// A move was broken off: the thread has less than it was told.
    is_narrow: bool,
}

impl Bounds {
    /// Those that the calling thread may use at this moment; none, and no move, where it cannot be asked.
    pub(crate) fn of_current_thread() -> Self {
        Self { told: affinity_of(0).unwrap_or_default(), is_narrow: false }
    }

    /// Moves the calling thread, whose bounds these are, to any of its other CPUs that are free. Afterwards it may go
    /// on to any of its CPUs. `false`: it stays, since none is free, or because it may not use all of its CPUs now, or
    /// others. Then somebody took CPUs away, from it or from the process, and what it is set to now is what the
    /// kernel would give back later.
    ///
    /// # Errors
    ///
    /// As [`pin_current_thread`].
    pub(crate) fn move_current_thread(&mut self, is_free: impl Fn(u32) -> bool) -> io::Result<bool> {
        if self.is_narrow {
            self.widen()?;
        }
        if affinity_of(0)? != self.told {
            return Ok(false);
        }
        let here = current_cpu();
        let is_other = |cpu: &u32| Some(*cpu) != here && is_free(*cpu);
        let free: Vec<u32> = self.told.iter().copied().filter(is_other).collect();
        if free.is_empty() {
            return Ok(false);
        }
        // The kernel moves a thread at once if it may not stay where it is.
        pin_current_thread(&free)?;
        self.is_narrow = true;
        self.widen()?;
        Ok(true)
    }

    fn widen(&mut self) -> io::Result<()> {
        pin_current_thread(&self.told)?;
        self.is_narrow = false;
        Ok(())
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
            assert!(!bounds.move_current_thread(|_| false).unwrap(), "there is no room");
            for wanted in &own {
                let was_there = current_cpu() == Some(*wanted);
                let moved = bounds.move_current_thread(|cpu| cpu == *wanted).unwrap();
                // Unless the kernel moved it just then.
                assert!(moved || was_there || current_cpu() == Some(*wanted));
                assert_eq!(affinity_of(0).unwrap(), own, "it may go anywhere it might before");
            }
            // A move that was broken off is made good.
            pin_current_thread(&own[..1]).unwrap();
            bounds.is_narrow = true;
            bounds.move_current_thread(|_| true).unwrap();
            assert_eq!((affinity_of(0).unwrap(), bounds.is_narrow), (own.clone(), false));
            if own.len() > 1 {
                // Who has less than it was told, since somebody took it away, is left alone.
                pin_current_thread(&own[1..]).unwrap();
                assert!(!bounds.move_current_thread(|_| true).unwrap());
                assert_eq!(affinity_of(0).unwrap(), own[1..]);
            }
        })
        .join()
        .unwrap();
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
