//! Writes the variants: the library's files as they are, and copies from which something is taken away.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// The modules of a variant, and their files from the library's root.
const FILES: [(&str, &str); 9] = [
    ("tally", "src/job/tally.rs"),
    ("course", "src/job/course.rs"),
    ("token", "src/job/token.rs"),
    ("sleep", "src/pool/sleep.rs"),
    ("register", "src/pool/register.rs"),
    ("guest", "tests/loom/src/models/guest.rs"),
    ("completion", "tests/loom/src/models/completion.rs"),
    ("cancel", "tests/loom/src/models/cancel.rs"),
    ("parking", "tests/loom/src/models/parking.rs"),
];

/// What is taken away: name of the variant, module, text (once in its file), what stands there instead.
const BROKEN: [(&str, &[(&str, &str, &str)]); 9] = [
    ("without_the_fence", &[("guest", "    fence();\n", "    drop(fence);\n")]),
    (
        "released_without_release",
        &[("course", "released.store(true, Ordering::Release)", "released.store(true, Ordering::Relaxed)")],
    ),
    ("notified_without_the_lock", &[("course", "let waiting = lock(&self.books).waiting;", "let waiting = 1;")]),
    (
        "ended_over_a_store",
        &[("tally", "self.held.iter().all(|held| !held.storing)", "true")],
    ),
    (
        "confirmed_after_the_end",
        &[
            ("tally", "if self.ended || self.stopping {\n            return false;\n        }\n", ""),
            ("tally", "std::mem::take(&mut self.held)", "self.held.clone()"),
        ],
    ),
    ("without_the_adders_fence", &[("sleep", "fence(Ordering::SeqCst);\n        if self.idle", "if self.idle")]),
    ("without_the_sleepers_fence", &[("sleep", "fence(Ordering::SeqCst);\n        let found", "let found")]),
    ("woken_twice", &[("sleep", "            beds.idle -= 1;\n", "")]),
    ("wakes_not_passed_on", &[("sleep", "if owes_a_wake {\n            self", "if owes_a_wake && false {\n            self")]),
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
