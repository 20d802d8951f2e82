//! Writes the variants: the library's files as they are, and copies from which something is taken away.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// The modules of a variant, and their files from the library's root.
const FILES: [(&str, &str); 13] = [
    ("tally", "src/job/tally.rs"),
    ("course", "src/job/course.rs"),
    ("bell", "src/job/bell.rs"),
    ("token", "src/job/token.rs"),
    ("sleep", "src/pool/sleep.rs"),
    ("register", "src/pool/register.rs"),
    ("quiet", "src/pool/machine/quiet.rs"),
    ("guest", "tests/loom/src/models/guest.rs"),
    ("completion", "tests/loom/src/models/completion.rs"),
    ("cancel", "tests/loom/src/models/cancel.rs"),
    ("parking", "tests/loom/src/models/parking.rs"),
    ("closing", "tests/loom/src/models/closing.rs"),
    ("burst", "tests/loom/src/models/burst.rs"),
];

/// An edit of a module: the text, which is there once, and what stands there instead.
type Edit = (&'static str, &'static str, &'static str);

/// What is taken away from the library, or from what the models assume of its callers.
const BROKEN: &[(&str, &[Edit])] = &[
    // A job's course.
    ("without_the_fence", &[("guest", "    fence();\n", "    drop(fence);\n")]),
    (
        "released_without_release",
        &[("course", "released.store(true, Ordering::Release)", "released.store(true, Ordering::Relaxed)")],
    ),
    (
        "notified_without_the_lock",
        &[("course", "let waiting = lock(&self.books).waiting;", "let waiting = 1;")],
    ),
    (
        "waiting_is_not_counted",
        &[("course", "            books.waiting += 1;\n", "            books.waiting += 0;\n")],
    ),
    (
        "let_go_after_the_waiters",
        &[
            ("course", "        job.let_go(notes);\n", ""),
            (
                "course",
                "        job.tell(&held);\n",
                "        job.let_go(notes);\n        job.tell(&held);\n",
            ),
        ],
    ),
    (
        "told_before_the_end",
        &[
            ("course", "        job.tell(&held);\n", ""),
            (
                "course",
                "        job.let_go(notes);\n",
                "        job.tell(&held);\n        job.let_go(notes);\n",
            ),
        ],
    ),
    (
        "rung_without_a_mark",
        &[("bell", "&mut *lock(&self.0), State::Rung)", "&mut *lock(&self.0), State::Bare)")],
    ),
    ("ended_over_a_store", &[("tally", "self.held.values().all(|held| !held.storing)", "true")]),
    (
        "confirmed_after_the_end",
        &[
            ("tally", "if self.ended || self.stopping {\n            return false;\n        }\n", ""),
            ("tally", "std::mem::take(&mut self.held)", "self.held.clone()"),
        ],
    ),
    (
        "stop_is_not_heard",
        &[(
            "course",
            "be_looked_at(now + STALL_GRACE);\n            self.changed.notify_all();",
            "be_looked_at(now);",
        )],
    ),
    (
        "looked_before_the_lock_of_the_wait",
        &[(
            "course",
            "            books.waiting += 1;\n",
            "            drop(books);\n            let mut books = lock(&self.books);\n            if self.result().is_some() {\n                \
             continue;\n            }\n            books.waiting += 1;\n",
        )],
    ),
    // Parking.
    (
        "without_the_adders_fence",
        &[("sleep", "fence(Ordering::SeqCst);\n        if self.idle", "if self.idle")],
    ),
    ("without_the_sleepers_fence", &[("sleep", "fence(Ordering::SeqCst);\n        let found", "let found")]),
    ("woken_twice", &[("sleep", "            beds.idle -= 1;\n", "")]),
    (
        "wakes_are_not_passed_on",
        &[(
            "sleep",
            "if owes_a_wake {\n            self",
            "if owes_a_wake && self.dormitory().is_none() {\n            self",
        )],
    ),
    (
        "naps_that_stay_idle",
        &[("sleep", "self.change(&mut beds, |beds| beds.idle = beds.idle.saturating_sub(1));\n", "")],
    ),
    (
        "left_in_silence",
        &[("sleep", "        self.pass_wake_on();\n    }\n\n    fn rest", "    }\n\n    fn rest")],
    ),
    (
        "counted_after_the_look",
        &[
            ("quiet", "            let before = arrivals();\n", ""),
            ("quiet", "let found = look();\n", "let found = look();\n            let before = arrivals();\n"),
        ],
    ),
    (
        "counted_before_it_is_queued",
        &[
            ("parking", "        self.tasks.push(task);\n", ""),
            (
                "parking",
                "fetch_add(1, Ordering::Release);\n",
                "fetch_add(1, Ordering::Release);\n        self.tasks.push(task);\n",
            ),
        ],
    ),
    // The service's drop.
    (
        "entered_without_the_lock",
        &[(
            "register",
            "        let mut known = lock(&self.known);\n        if self.is_closed() {\n            return false;\n        }\n",
            "        if self.is_closed() {\n            return false;\n        }\n        let mut known = lock(&self.known);\n",
        )],
    ),
    ("called_without_a_count", &[("sleep", "        lock(&self.beds).calls += 1;\n", "")]),
    (
        "called_by_permits",
        &[(
            "sleep",
            "lock(&self.beds).calls += 1;",
            "self.change(&mut lock(&self.beds), |beds| beds.permits += std::mem::take(&mut beds.idle));",
        )],
    ),
    (
        "asleep_without_a_look_at_the_flag",
        &[(
            "sleep",
            "if self.is_to_leave() { Ok(None) } else { self.find().map(Some) }",
            "self.find().map(Some)",
        )],
    ),
    // The token of a burst.
    (
        "given_back_by_everybody",
        &[("token", "if change(&self.has, true, false) {", "if self.has.load(Ordering::Acquire) {")],
    ),
    (
        "not_given_back_when_dropped",
        &[("token", "    fn drop(&mut self) {\n        self.give_back();", "    fn drop(&mut self) {")],
    ),
];

fn main() {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let root = here.join("../..").canonicalize().expect("the library is two folders up");
    let mut variants = String::new();
    variant(&mut variants, "intact", |_, file| root.join(file));
    for (name, edits) in BROKEN {
        variant(&mut variants, name, |module, file| {
            let edits: Vec<_> = edits.iter().filter(|(edited, ..)| *edited == module).collect();
            if edits.is_empty() {
                return root.join(file);
            }
            let mut text = fs::read_to_string(root.join(file)).expect("a file of the library");
            for (_, old, new) in edits {
                assert_eq!(text.matches(old).count(), 1, "{name}: {file} should have once: {old}");
                text = text.replace(old, new);
            }
            let copy = out.join(format!("{name}-{module}.rs"));
            fs::write(&copy, text).expect("the build folder can be written to");
            copy
        });
    }
    fs::write(out.join("variants.rs"), variants).expect("the build folder can be written to");
    println!("cargo::rerun-if-changed=build.rs");
    FILES.iter().for_each(|(_, file)| println!("cargo::rerun-if-changed={}", root.join(file).display()));
}

/// One variant as a module. What a user may run of it is public: the models.
fn variant(out: &mut String, name: &str, path: impl Fn(&str, &str) -> PathBuf) {
    writeln!(out, "pub mod {name} {{").expect("a string grows");
    for (module, file) in FILES {
        let path: &Path = &path(module, file);
        let public = if file.starts_with("tests/") { "pub " } else { "" };
        writeln!(out, "#[path = {path:?}] {public}mod {module};").expect("a string grows");
    }
    out.push_str("}\n");
}
