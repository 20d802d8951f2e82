use super::super::populate;
use super::*;

const PAGES: usize = 200;

/// A mapping of `PAGES` base pages, all of them written to.
struct Memory(*mut libc::c_void, usize);

impl Memory {
    fn new(flags: libc::c_int, file: Option<&File>) -> Self {
        let len = PAGES * page_size() as usize;
        let (fd, flags) = file.map_or((-1, flags | libc::MAP_ANONYMOUS), |file| (file.as_raw_fd(), flags));
        // SAFETY: a new mapping at an address of the kernel's choosing, written to in its whole length.
        unsafe {
            let rw = libc::PROT_READ | libc::PROT_WRITE;
            let at = libc::mmap(std::ptr::null_mut(), len, rw, flags, fd, 0);
            assert_ne!(at, libc::MAP_FAILED);
            libc::madvise(at, len, libc::MADV_NOHUGEPAGE);
            at.cast::<u8>().write_bytes(0xA5, len);
            Self(at, len)
        }
    }

    fn page(&self, index: usize) -> *mut libc::c_void {
        self.0.wrapping_byte_add(index * page_size() as usize)
    }

    fn advise(&self, index: usize, pages: usize, advice: libc::c_int) -> bool {
        // SAFETY: pages of the test's own mapping, to whose bytes nobody holds a reference.
        unsafe { libc::madvise(self.page(index), pages * page_size() as usize, advice) == 0 }
    }

    fn chunk(&self) -> Chunk<'_> {
        // SAFETY: the mapping lives as long as the borrow, and no reference to its bytes exists.
        unsafe { Chunk::from_raw(self.0.cast(), self.1) }
    }

    /// Numbers of the absent pages, as both ways of asking tell them.
    fn absent(&self) -> Vec<usize> {
        let presence = Presence::default();
        let survey = presence.survey(&self.chunk());
        let pages = self.0 as u64..self.0 as u64 + self.1 as u64;
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        assert_eq!(read_entries(&pagemap, pages, page_size()).unwrap().absent, survey.absent);
        let number = |at: u64| ((at - self.0 as u64) / page_size()) as usize;
        survey.absent.into_iter().flat_map(|run| number(run.start)..number(run.end)).collect()
    }

    fn is_proved(&self) -> Result<bool, i32> {
        let presence = Presence::default();
        presence.is_populated(&self.chunk(), &presence.survey(&self.chunk()))
    }

    fn waits_for_nobody(&self) -> bool {
        let presence = Presence::default();
        presence.waits_for_nobody(&self.chunk(), &presence.survey(&self.chunk()), false)
    }

    fn populate(&self) -> Result<(), i32> {
        let proved = self.is_proved()?;
        assert!(!proved || populate(&self.chunk()).is_ok(), "proved, and wrong");
        if proved { Ok(()) } else { populate(&self.chunk()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the test's own mapping, unused from here on.
        unsafe { libc::munmap(self.0, self.1) };
    }
}

fn file() -> File {
    sealed_memfd(c"present", PAGES as u64 * page_size(), None).unwrap()
}

fn kernel_answers() -> bool {
    let answers = super::super::kernel_is_at_least(6, 11);
    if !answers {
        println!("SKIPPED: PROCMAP_QUERY needs Linux 6.11");
    }
    answers
}

#[test]
fn memory_that_was_written_is_there() {
    let file = file();
    for memory in [
        Memory::new(libc::MAP_PRIVATE, None),
        Memory::new(libc::MAP_SHARED, None),
        Memory::new(libc::MAP_SHARED, Some(&file)),
    ] {
        assert!(memory.absent().is_empty());
        assert_eq!(memory.is_proved(), Ok(kernel_answers()));
    }
}

#[test]
fn a_page_that_is_not_there_is_never_proved() {
    for index in [0, 1, PAGES / 2, PAGES - 1] {
        let memory = Memory::new(libc::MAP_PRIVATE, None);
        assert!(memory.advise(index, 1, libc::MADV_DONTNEED));
        assert_eq!(memory.absent(), [index]);
        assert_eq!(memory.is_proved(), Ok(false), "absent");
        // SAFETY: reads a byte of the test's own mapping, which brings the zero page in.
        assert_eq!(unsafe { memory.page(index).cast::<u8>().read_volatile() }, 0);
        assert_eq!((memory.absent(), memory.is_proved()), (vec![], Ok(false)), "the zero page");
        assert_eq!(memory.populate(), Ok(()));
        assert_eq!(memory.is_proved(), Ok(kernel_answers()));
    }
}

/// More runs than one answer of the kernel holds.
#[test]
fn every_second_page() {
    let memory = Memory::new(libc::MAP_PRIVATE, None);
    let gone: Vec<usize> = (0..PAGES).filter(|page| page % 2 == 1 || (40..50).contains(page)).collect();
    for &page in &gone {
        assert!(memory.advise(page, 1, libc::MADV_DONTNEED));
    }
    assert_eq!(memory.absent(), gone);
}

/// A guard region (Linux 6.13) has no page, and a store there is a signal.
#[test]
fn a_guard_region_is_not_absent() {
    const MADV_GUARD_INSTALL: libc::c_int = 102;
    let memory = Memory::new(libc::MAP_PRIVATE, None);
    if !memory.advise(7, 3, MADV_GUARD_INSTALL) {
        println!("SKIPPED: guard regions need Linux 6.13");
        return;
    }
    assert_eq!((memory.absent(), memory.is_proved()), (vec![], Ok(false)));
    assert!(memory.populate().is_err());
}

/// Entries as the kernel writes them: only one that says nothing, or no more than soft-dirty, is empty.
#[test]
fn pagemap_entries() {
    let path = std::env::temp_dir().join(format!("vm-zeroing-pagemap-{}", std::process::id()));
    let absent = |entries: &[u64], from: u64| {
        let bytes: Vec<u8> = entries.iter().flat_map(|bits| bits.to_ne_bytes()).collect();
        std::fs::write(&path, bytes).unwrap();
        let page = 4096;
        let end = entries.len() as u64;
        let survey = read_entries(&File::open(&path).unwrap(), from * page..end * page, page).unwrap();
        assert!(!survey.all_plain);
        survey.absent.iter().map(|run| (run.start / page, run.end / page)).collect::<Vec<_>>()
    };
    let (present, swapped, shared, exclusive, soft_dirty) = (1 << 63, 1 << 62, 1 << 61, 1 << 56, 1 << 55);
    assert_eq!(absent(&[present, 0, soft_dirty, 0], 1), [(1, 4)], "from the second on");
    for one in [present, swapped, shared, exclusive, 1, swapped | soft_dirty, present | 0x1234] {
        assert_eq!(absent(&[0, 0, one, 0], 0), [(0, 2), (3, 4)], "{one:#x}");
    }
    // More entries than are read at once, the last one not empty.
    let mut many = vec![0; 1300];
    assert_eq!(absent(&many, 0), [(0, 1300)]);
    many[1299] = swapped;
    assert_eq!(absent(&many, 0), [(0, 1299)]);
    // A pagemap that ends early proves nothing.
    assert!(read_entries(&File::open(&path).unwrap(), 0..1301 * 4096, 4096).is_err());
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_private_mapping_of_a_file_is_not_believed() {
    assert_eq!(Memory::new(libc::MAP_PRIVATE, Some(&file())).is_proved(), Ok(false));
}

#[test]
fn a_page_that_may_not_be_written_is_an_error() {
    let memory = Memory::new(libc::MAP_SHARED, Some(&file()));
    // SAFETY: takes a right from the test's own mapping.
    unsafe { libc::mprotect(memory.page(PAGES / 2), page_size() as usize, libc::PROT_READ) };
    assert!(memory.populate().is_err());
}

#[test]
fn a_hole_between_mappings_is_an_error() {
    let memory = Memory::new(libc::MAP_PRIVATE, None);
    // SAFETY: a page of the test's own mapping; nobody maps there before it is unmapped again as a whole.
    unsafe {
        let nothing = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        libc::mmap(memory.page(PAGES / 2), page_size() as usize, libc::PROT_NONE, nothing, -1, 0);
    }
    assert!(memory.populate().is_err());
}

#[test]
fn a_file_cut_short_is_an_error() {
    // SAFETY: a name and no memory.
    let file = unsafe {
        use std::os::fd::FromRawFd;
        File::from_raw_fd(libc::memfd_create(c"cut".as_ptr(), libc::MFD_CLOEXEC))
    };
    file.set_len(PAGES as u64 * page_size()).unwrap();
    let memory = Memory::new(libc::MAP_SHARED, Some(&file));
    file.set_len((PAGES as u64 - 1) * page_size()).unwrap();
    assert_eq!(memory.populate(), Err(libc::EFAULT));
}

#[test]
fn stores_to_memory_wait_for_nobody() {
    let file = file();
    for (flags, file) in [
        (libc::MAP_PRIVATE, None),
        (libc::MAP_SHARED, None),
        (libc::MAP_SHARED, Some(&file)),
        (libc::MAP_PRIVATE, Some(&file)),
    ] {
        let memory = Memory::new(flags, file);
        assert_eq!(memory.waits_for_nobody(), kernel_answers());
        assert!(memory.advise(7, 1, libc::MADV_DONTNEED));
        assert!(!memory.waits_for_nobody(), "a page is not there");
    }
}

/// The zero page is there, and yet a store needs a page from the host.
#[test]
fn a_store_to_the_zero_page_waits_for_the_host() {
    let memory = Memory::new(libc::MAP_PRIVATE, None);
    assert!(memory.advise(7, 1, libc::MADV_DONTNEED));
    // SAFETY: reads a byte of the test's own mapping, which brings the zero page in.
    assert_eq!(unsafe { memory.page(7).cast::<u8>().read_volatile() }, 0);
    assert!(memory.absent().is_empty() && !memory.waits_for_nobody());
}

/// A page of a file that is there may have been read only, and a store to it is the file system's business.
#[test]
fn a_store_to_a_file_waits_for_its_file_system() {
    let path = std::env::current_exe().unwrap().with_file_name(format!("present-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.set_len(PAGES as u64 * page_size()).unwrap();
    for flags in [libc::MAP_SHARED, libc::MAP_PRIVATE] {
        let memory = Memory::new(flags, Some(&file));
        assert!(memory.absent().is_empty() && !memory.waits_for_nobody());
    }
}
