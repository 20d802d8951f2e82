//! The two ways the kernel writes a set of CPUs or nodes: "0-3,8,10-11" and "ff,0000000f". Pure.

/// Ids from here on are not believed: Linux builds have at most 8192 CPUs and 1024 nodes, and a list
/// such as "0-4294967295" must not become memory.
pub(super) const ID_LIMIT: u32 = 1 << 16;

/// What a list should have looked like, for errors.
pub(super) const LIST: &str = "a list like 0-3,8 of ids below 65536";
/// What a mask should have looked like, for errors.
pub(super) const MASK: &str = "hexadecimal words like 0000ffff,00000003 of ids below 65536";

/// A set of ids below [`ID_LIMIT`], grown as ids come: 8 KiB at most, whatever the text repeats.
#[derive(Default)]
struct IdSet(Vec<u64>);

impl IdSet {
    fn insert(&mut self, id: u32) {
        let word = (id / 64) as usize;
        if word >= self.0.len() {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (id % 64);
    }

    fn into_ids(self) -> Vec<u32> {
        let words = self.0.iter().zip((0u32..).step_by(64));
        words
            .flat_map(|(word, base)| {
                (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| base + bit)
            })
            .collect()
    }
}

/// The text of a file without what is no text: captures are padded with NUL bytes.
pub(super) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).trim().to_owned()
}

/// Decimal digits and nothing else (`str::parse` takes a sign).
pub(super) fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if digits { text.parse().ok() } else { None }
}

/// A decimal number below [`ID_LIMIT`].
pub(super) fn id(text: &str) -> Option<u32> {
    number(text).and_then(|id| u32::try_from(id).ok()).filter(|id| *id < ID_LIMIT)
}

/// The ids of "0-3,8,10-11", ascending, each once; the blank text is the empty set. `None` when the
/// text is anything else.
pub(super) fn parse_list(text: &str) -> Option<Vec<u32>> {
    let mut set = IdSet::default();
    if text.trim().is_empty() {
        return Some(Vec::new());
    }
    for part in text.split(',').map(str::trim) {
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (id(first)?, id(last)?),
            None => (id(part)?, id(part)?),
        };
        if first > last {
            return None;
        }
        (first..=last).for_each(|id| set.insert(id));
    }
    Some(set.into_ids())
}

/// The ids of a mask: 32-bit words in hexadecimal, the most significant first. `None` when the text is
/// anything else.
pub(super) fn parse_mask(text: &str) -> Option<Vec<u32>> {
    let mut set = IdSet::default();
    let words: Vec<&str> = text.trim().split(',').collect();
    for (word, base) in words.iter().rev().zip((0u32..).step_by(32)) {
        // One word alone may be of any length.
        if word.is_empty() || (words.len() > 1 && word.len() > 8) {
            return None;
        }
        for (digit, shift) in word.chars().rev().zip((0u32..).step_by(4)) {
            let bits = digit.to_digit(16)?;
            for bit in (0..4).filter(|bit| bits >> bit & 1 == 1) {
                let id = base.checked_add(shift)?.checked_add(bit)?;
                if id >= ID_LIMIT {
                    return None;
                }
                set.insert(id);
            }
        }
    }
    Some(set.into_ids())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Write;

    use proptest::prelude::*;

    use super::*;

    /// Writes a set as `bitmap_print_to_pagebuf` does.
    fn print_list(ids: &BTreeSet<u32>) -> String {
        let mut parts = Vec::new();
        let mut ids = ids.iter().copied().peekable();
        while let Some(first) = ids.next() {
            let mut last = first;
            while ids.next_if_eq(&(last + 1)).is_some() {
                last += 1;
            }
            parts.push(if first == last { first.to_string() } else { format!("{first}-{last}") });
        }
        parts.join(",")
    }

    fn print_mask(ids: &BTreeSet<u32>, words: u32) -> String {
        let mut text = String::new();
        for word in (0..words).rev() {
            let value = (0..32)
                .filter(|bit| ids.contains(&(word * 32 + bit)))
                .fold(0u32, |value, bit| value | 1 << bit);
            write!(text, "{value:08x}{}", if word > 0 { "," } else { "" }).unwrap();
        }
        text
    }

    proptest! {
        #[test]
        fn what_the_kernel_prints_is_read_back(ids in prop::collection::btree_set(0u32..700, 0..200), padding in 0usize..9) {
            let expected: Vec<u32> = ids.iter().copied().collect();
            let mut bytes = print_list(&ids).into_bytes();
            bytes.push(b'\n');
            bytes.resize(bytes.len() + padding, 0);
            prop_assert_eq!(parse_list(&text(&bytes)), Some(expected.clone()));
            prop_assert_eq!(parse_mask(&print_mask(&ids, 22)), Some(expected));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[0-9a-f,\\- x]{0,40}") {
            for ids in [parse_list(&text), parse_mask(&text)].into_iter().flatten() {
                prop_assert!(ids.is_sorted_by(|a, b| a < b), "{:?}", ids);
                prop_assert!(ids.iter().all(|id| *id < ID_LIMIT));
            }
        }
    }

    #[test]
    fn lists() {
        assert_eq!(parse_list("0-3,8,10-11"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(parse_list(" \n"), Some(vec![]));
        assert_eq!(parse_list("5,1-2,2-3"), Some(vec![1, 2, 3, 5]), "in any order, doubled");
        for junk in [
            "3-1",
            "1,,2",
            "-",
            "1-",
            "-1",
            "+1",
            "0x1",
            "a",
            "0-4294967295",
            "65536",
            "99999999999999999999",
        ] {
            assert_eq!(parse_list(junk), None, "{junk}");
        }
        let repeated = vec!["0-65535"; 500].join(",");
        assert_eq!(parse_list(&repeated).map(|ids| ids.len()), Some(65536));
    }

    #[test]
    fn masks() {
        assert_eq!(parse_mask("ff"), Some((0..8).collect()));
        assert_eq!(parse_mask("0000,00000003,80000001"), Some(vec![0, 31, 32, 33]));
        assert_eq!(parse_mask("1000000000"), Some(vec![36]), "one long word");
        for junk in ["", ",", "1,", "0x1", "xyz", "100000000,00000000"] {
            assert_eq!(parse_mask(junk), None, "{junk}");
        }
        assert_eq!(parse_mask(&format!("1{}", "0".repeat(1 << 15))), None, "an id beyond the limit");
    }
}
