//! Zeroing guest memory through the service: every byte, and nothing else.

use std::sync::Arc;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vm_zeroing::{Intent, ZeroingService};

#[test]
fn smoke() {
    let t = std::time::Instant::now();
    let service = ZeroingService::builder().build().unwrap();
    eprintln!("build {:?} workers {}", t.elapsed(), service.workers());
    let len = 1 << 30;
    let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), len)]).unwrap());
    let buf = vec![0xa5u8; 1 << 20];
    for i in 0..(len >> 20) {
        memory.write_slice(&buf, GuestAddress((i << 20) as u64)).unwrap();
    }
    for _ in 0..3 {
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        let report = job.wait().unwrap();
        eprintln!("{report:?} {}", report.gb_per_s());
    }
    let t = std::time::Instant::now();
    drop(service);
    eprintln!("drop {:?}", t.elapsed());
    let mut b = vec![1u8; len];
    memory.read_slice(&mut b, GuestAddress(0)).unwrap();
    assert!(b.iter().all(|x| *x == 0));
}
