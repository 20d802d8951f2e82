//! Which lanes are worth a look.

/// What a worker remembers of a lane in which it found nothing: how many tasks had come by then. As long as no
/// other has, there is nothing. A look in vain goes to the queues of all nodes and all workers; on a machine
/// with hundreds of these it costs a twentieth of a chunk's time, and without this each chunk of a normal job
/// would begin with such a look in the lane of the urgent ones.
///
/// Whoever adds a task queues it first and counts it then; whoever looks reads the count first. So a task that
/// is not found although it is counted was taken by somebody, and one that is queued after the look is counted
/// after it too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Quiet {
    arrivals: Option<u64>,
}

impl Quiet {
    /// Looks for a task with `look`, unless none has come since that was in vain. `arrivals` counts the tasks that
    /// have come to the lane; it is not asked while there is something to find: where workers add tasks all the
    /// time, reading their counts is dear.
    pub(crate) fn look<T>(
        &mut self,
        arrivals: impl Fn() -> u64,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        if self.arrivals.is_some_and(|known| known == arrivals()) {
            return None;
        }
        self.arrivals = None;
        look().or_else(|| {
            let before = arrivals();
            let found = look();
            self.arrivals = found.is_none().then_some(before);
            found
        })
    }
}
