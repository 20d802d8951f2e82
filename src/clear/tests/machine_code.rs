//! A reader of machine code: what a kernel stores, in its loop and on its ways out.
//!
//! The code is read from memory at the function's address and followed along all branches, so it is what this
//! build really runs, with and without optimisation, for methods this CPU lacks too.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;

use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind,
    Register,
};

/// What is wrong with a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    /// A way out, or a call, is reached with a weakly ordered store not yet fenced.
    Unfenced,
    /// A fence without need.
    Fence,
    /// The store the kernel is named after is not in its loop.
    NoStore,
    /// The loop writes memory in another way, or there are weakly ordered stores outside it.
    OtherStore,
    /// A register is used by less than its 64 bits, and not as data.
    Narrow,
    /// The stores of a turn are not each byte from the pointer up to its next value, once; or the counter does
    /// not go down by as much, or the turn is not taken again until it is zero.
    Turn,
    /// It never returns.
    NoReturn,
}

/// The store a kernel is to consist of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) mnemonic: Mnemonic,
    pub(super) bytes: u64,
}

impl Wanted {
    pub(super) fn is_weakly_ordered(self) -> bool {
        is_weakly_ordered(self.mnemonic)
    }
}

/// The code between a function's entry and its ways out.
pub(super) struct Code {
    pub(super) instructions: BTreeMap<u64, Instruction>,
    /// What may come after each instruction.
    next: HashMap<u64, Vec<u64>>,
    /// Ways out, or calls, that are reached with a weakly ordered store not yet fenced.
    pub(super) unfenced: Vec<u64>,
    returns: usize,
}

impl Code {
    /// Follows all paths from `entry`. The state at an instruction is whether a weakly ordered store is
    /// behind us and no SFENCE since; each instruction is visited at most once in either state.
    pub(super) fn read(entry: *const ()) -> Self {
        let memory = File::open("/proc/self/mem").unwrap();
        let (instructions, next) = (BTreeMap::new(), HashMap::new());
        let mut code = Code { instructions, next, unfenced: Vec::new(), returns: 0 };
        let mut seen = HashSet::new();
        let mut paths = vec![(entry as u64, false)];
        while let Some((at, pending)) = paths.pop() {
            if !seen.insert((at, pending)) {
                continue;
            }
            let mut bytes = [0; 15];
            let read = memory.read_at(&mut bytes, at).unwrap();
            let instruction = Decoder::with_ip(64, &bytes[..read], at, DecoderOptions::NONE).decode();
            assert!(!instruction.is_invalid(), "no instruction at {at:#x}: {bytes:x?}");
            code.instructions.insert(at, instruction);
            assert!(code.instructions.len() < 5000, "kernels are small; we have run out of one");

            let pending = match instruction.mnemonic() {
                Mnemonic::Sfence => false,
                mnemonic => pending || is_weakly_ordered(mnemonic),
            };
            let (after, target) = (instruction.next_ip(), instruction.near_branch_target());
            let next = match instruction.flow_control() {
                FlowControl::Next => vec![after],
                FlowControl::ConditionalBranch => vec![after, target],
                // A tail call too: what it leads to is read on.
                FlowControl::UnconditionalBranch => vec![target],
                FlowControl::Return | FlowControl::IndirectBranch => {
                    code.returns += 1;
                    code.unfenced.extend(pending.then_some(at));
                    vec![]
                }
                // A callee must neither see unfenced stores nor be trusted to fence them, and is read on.
                FlowControl::Call | FlowControl::IndirectCall => {
                    code.unfenced.extend(pending.then_some(at));
                    if instruction.is_call_near() { vec![after, target] } else { vec![after] }
                }
                FlowControl::Exception | FlowControl::Interrupt => vec![],
                other => panic!("{at:#x}: a kernel has no business with {other:?}"),
            };
            paths.extend(next.iter().map(|&next| (next, pending)));
            code.next.insert(at, next);
        }
        code
    }

    pub(super) fn has(&self, wanted: impl Fn(Mnemonic) -> bool) -> bool {
        self.instructions.values().any(|instruction| wanted(instruction.mnemonic()))
    }

    /// What is wrong with it as a kernel of that store.
    pub(super) fn faults(&self, wanted: Wanted) -> BTreeSet<Fault> {
        let mut faults = BTreeSet::new();
        let mut check = |right: bool, fault| {
            if !right {
                faults.insert(fault);
            }
        };
        let weak = wanted.is_weakly_ordered();
        check(self.unfenced.is_empty(), Fault::Unfenced);
        check(weak || !self.has(|found| found == Mnemonic::Sfence), Fault::Fence);
        check(self.returns > 0, Fault::NoReturn);

        let body = self.loops();
        let intended = |instruction: &Instruction| {
            let stores = stores(instruction);
            instruction.mnemonic() == wanted.mnemonic
                && matches!(&stores[..], [only] if only.bytes == wanted.bytes)
        };
        check(body.iter().any(intended), Fault::NoStore);
        for (at, instruction) in &self.instructions {
            let looped = body.iter().any(|looped| looped.ip() == *at);
            let writes = looped && !stores(instruction).is_empty();
            let weakly = is_weakly_ordered(instruction.mnemonic());
            check(if looped { !writes || intended(instruction) } else { !weakly }, Fault::OtherStore);
            check(!is_narrow(instruction), Fault::Narrow);
        }
        check(!weak || covers_each_byte_once(&body), Fault::Turn);
        faults
    }

    /// The instructions that can come after themselves: all that lies between the target of a back edge and
    /// the branch back. An instruction with REP is a loop of its own.
    fn loops(&self) -> Vec<Instruction> {
        let returns_to = |start: u64| {
            let mut seen = HashSet::new();
            let mut paths = self.next[&start].clone();
            while let Some(at) = paths.pop() {
                if seen.insert(at) {
                    paths.extend(&self.next[&at]);
                }
            }
            seen.contains(&start)
        };
        let looped = |(at, found): (&u64, &Instruction)| {
            (found.has_rep_prefix() || found.has_repne_prefix() || returns_to(*at)).then_some(*found)
        };
        self.instructions.iter().filter_map(looped).collect()
    }
}

/// Stores that later stores may overtake (Intel SDM volume 1, 10.4.6.2; MOVDIRI, MOVDIR64B in volume 2; AMD
/// APM volume 3, CLZERO).
pub(super) fn is_weakly_ordered(mnemonic: Mnemonic) -> bool {
    use Mnemonic::*;
    matches!(
        mnemonic,
        Movnti
            | Movntq
            | Movntdq
            | Movntps
            | Movntpd
            | Movntss
            | Movntsd
            | Vmovntdq
            | Vmovntps
            | Vmovntpd
            | Maskmovq
            | Maskmovdqu
            | Vmaskmovdqu
            | Movdiri
            | Movdir64b
            | Clzero
    )
}

fn writes(access: OpAccess) -> bool {
    matches!(access, OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite)
}

/// Bytes that an instruction writes.
struct Stored {
    base: Register,
    index: Register,
    displacement: u64,
    bytes: u64,
}

/// What an instruction writes to memory, named or implied. With REP, what it writes in one step.
fn stores(instruction: &Instruction) -> Vec<Stored> {
    if instruction.mnemonic() == Mnemonic::Clzero {
        // The decoder lists none for it.
        return vec![Stored { base: Register::RAX, index: Register::None, displacement: 0, bytes: 64 }];
    }
    let mut factory = InstructionInfoFactory::new();
    let used = factory.info(instruction).used_memory().iter().filter(|used| writes(used.access()));
    used.map(|used| {
        let string = instruction.is_string_instruction();
        let size = if string { instruction.memory_size() } else { used.memory_size() };
        let (base, index, bytes) = (used.base(), used.index(), size.size() as u64);
        Stored { base, index, displacement: used.displacement(), bytes }
    })
    .collect()
}

/// The registers that an instruction writes, named or implied.
fn written(instruction: &Instruction) -> Vec<Register> {
    let mut factory = InstructionInfoFactory::new();
    let used = factory.info(instruction).used_registers().iter();
    used.filter(|used| writes(used.access())).map(|used| used.register().full_register()).collect()
}

/// Whether an instruction computes, addresses or counts in less than 64 bits. What is stored may be narrow, and
/// a constant.
fn is_narrow(instruction: &Instruction) -> bool {
    let narrow = |register: Register| register.is_gpr() && !register.is_gpr64();
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info(instruction);
    let addressed = info.used_memory().iter().any(|memory| narrow(memory.base()) || narrow(memory.index()));
    let named = (0..instruction.op_count())
        .any(|op| instruction.op_kind(op) == OpKind::Register && narrow(instruction.op_register(op)));
    let implied = info.used_registers().iter().any(|used| {
        let reads = !matches!(used.access(), OpAccess::Write | OpAccess::CondWrite | OpAccess::None);
        reads && narrow(used.register())
    });
    let zeroes =
        instruction.mnemonic() == Mnemonic::Xor && instruction.op0_register() == instruction.op1_register();
    let constant = matches!(
        (instruction.mnemonic(), instruction.op1_kind()),
        (Mnemonic::Mov, OpKind::Immediate8 | OpKind::Immediate32)
    );
    addressed || (named || implied) && !zeroes && !constant && !instruction.is_string_instruction()
}

/// What a register holds in a turn: the value that one had before it, and what has been added since.
type Held = (Register, u64);

const UNKNOWN: Held = (Register::None, 0);

/// Runs one turn of a loop of lines: whether it stores each byte between its pointer and the pointer's next value
/// once, and takes the turn again until a counter that goes down by as much is zero.
fn covers_each_byte_once(body: &[Instruction]) -> bool {
    let Some((branch, turn)) = body.split_last() else { return false };
    let mut held: HashMap<Register, Held> = HashMap::new();
    let mut stored: Vec<(Held, u64)> = Vec::new();
    // The counter, where the flags tell of nothing else.
    let mut counter = None;
    for instruction in turn {
        let value = |register| held.get(&register).copied().unwrap_or((register, 0));
        let plus = |(root, sum): Held, more: u64| (root, sum.wrapping_add(more));
        for store in stores(instruction) {
            let base = if store.index == Register::None { value(store.base) } else { UNKNOWN };
            stored.push((plus(base, store.displacement), store.bytes));
        }
        let to = instruction.op0_register();
        let constant = instruction.try_immediate(1);
        if instruction.rflags_modified() != 0 {
            counter = (instruction.mnemonic() == Mnemonic::Sub).then_some(to);
        }
        let now = match (instruction.mnemonic(), constant) {
            (Mnemonic::Add, Ok(more)) => plus(value(to), more),
            (Mnemonic::Sub, Ok(less)) => plus(value(to), less.wrapping_neg()),
            (Mnemonic::Mov, Err(_)) => value(instruction.op1_register()),
            (Mnemonic::Lea, _) => plus(value(instruction.memory_base()), instruction.memory_displacement64()),
            _ if instruction.flow_control() != FlowControl::Next => return false,
            _ => {
                held.extend(written(instruction).into_iter().map(|register| (register, UNKNOWN)));
                continue;
            }
        };
        held.insert(to, now);
    }
    stored.sort_unstable();
    let Some(&((pointer, 0), _)) = stored.first() else { return false };
    let end = stored
        .iter()
        .try_fold(0, |end, &((root, from), bytes)| (root == pointer && from == end).then_some(end + bytes));
    let steps = |register: Register, step: u64| held.get(&register) == Some(&(register, step));
    branch.mnemonic() == Mnemonic::Jne
        && end.is_some_and(|end| {
            steps(pointer, end) && counter.is_some_and(|counter| steps(counter, end.wrapping_neg()))
        })
}
