//! Sizes on the command line and in tables: powers of 1024.

/// What every method stores whole.
pub const LINE: u64 = 64;

/// Half of the address space that a process has on the largest x86-64 CPUs without 5-level paging.
const LARGEST: u64 = 64 << 40;

/// Sizes in bytes, ascending, each once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes(pub Vec<u64>);

/// Text that is no size, or no range of sizes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    #[error("{0:?} does not begin with a number; write 64K or 65536")]
    NoNumber(String),
    #[error("{0:?} is no unit; the units are K, M, G and T")]
    Unit(String),
    #[error("{0} is more than 64 TiB")]
    TooLarge(String),
    #[error("{0} bytes are no whole number of {LINE}-byte lines (at least one)")]
    NotLines(u64),
    #[error("the range {0} ends before it begins; write the smaller size first")]
    Inverted(String),
    #[error("{0:?} is no step of a range; write *2 or *4, as in 4K..1G*2")]
    Step(String),
}

/// `64K`, `1g`, `4096`, `2 MiB`: whole lines.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(SizeError::NoNumber(text.to_owned()));
    }
    let unit = unit.trim();
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(SizeError::Unit(unit.to_owned())),
    };
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    let bytes = bytes.filter(|bytes| *bytes <= LARGEST).ok_or(SizeError::TooLarge(text.to_owned()))?;
    if bytes == 0 || bytes % LINE != 0 {
        return Err(SizeError::NotLines(bytes));
    }
    Ok(bytes)
}

/// `4K..4G` (by fours, the end included), `4K..4G*2` (by twos), `4K,64K,1M`, or several of these.
pub fn parse_sizes(text: &str) -> Result<Sizes, SizeError> {
    let mut sizes = Vec::new();
    for part in text.split(',') {
        match part.split_once("..") {
            None => sizes.push(parse_size(part)?),
            Some((from, rest)) => {
                let (to, step) = rest.split_once('*').unwrap_or((rest, "4"));
                let (from, to) = (parse_size(from)?, parse_size(to)?);
                let step = match step.trim() {
                    "2" => 2,
                    "4" => 4,
                    other => return Err(SizeError::Step(other.to_owned())),
                };
                if from > to {
                    return Err(SizeError::Inverted(part.trim().to_owned()));
                }
                sizes.extend(
                    std::iter::successors(Some(from), |size| Some(size * step)).take_while(|size| *size < to),
                );
                sizes.push(to);
            }
        }
    }
    sizes.sort_unstable();
    sizes.dedup();
    Ok(Sizes(sizes))
}

/// In the largest unit that divides it: `64 KiB`.
pub fn show(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift) {
        Some((shift, unit)) => format!("{} {unit}", bytes >> shift),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_bytes_or_carry_a_unit() {
        for (text, bytes) in [
            ("64", 64),
            ("4096", 4096),
            ("64K", 65_536),
            (" 16mib ", 16 << 20),
            ("1g", 1 << 30),
            ("2 GiB", 2 << 30),
            ("64T", 64 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn ranges_go_by_fours_or_twos_and_include_their_end() {
        for (text, sizes) in [
            ("4K..256K", vec![4 << 10, 16 << 10, 64 << 10, 256 << 10]),
            ("4K..32K*2", vec![4 << 10, 8 << 10, 16 << 10, 32 << 10]),
            ("4K..100K*4", vec![4 << 10, 16 << 10, 64 << 10, 100 << 10]),
            ("1M..1M", vec![1 << 20]),
            ("1M,4K,1M", vec![4 << 10, 1 << 20]),
            ("2M,4K..16K", vec![4 << 10, 16 << 10, 2 << 20]),
        ] {
            assert_eq!(parse_sizes(text), Ok(Sizes(sizes)), "{text}");
        }
        assert_eq!(parse_sizes("4K..4G").unwrap().0.len(), 11);
        assert_eq!(parse_sizes("64..64T").unwrap().0.last(), Some(&(64 << 40)));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, named) in [
            ("", "does not begin with a number"),
            ("4K,", "does not begin with a number"),
            ("..4K", "does not begin with a number"),
            ("4K..", "does not begin with a number"),
            ("-4096", "does not begin with a number"),
            ("12Q", "\"Q\" is no unit"),
            ("1.5G", "\".5G\" is no unit"),
            ("4K..8Z", "\"Z\" is no unit"),
            ("0", "0 bytes are no whole number of 64-byte lines"),
            ("0..4K", "0 bytes"),
            ("100", "100 bytes"),
            ("65T", "65T is more than 64 TiB"),
            ("18446744073709551616", "more than 64 TiB"),
            ("16777216T", "more than 64 TiB"),
            ("1G..4K", "the range 1G..4K ends before it begins"),
            ("4K..1G*3", "\"3\" is no step"),
            ("4K..1G*", "\"\" is no step"),
        ] {
            let error = parse_sizes(text).expect_err(text).to_string();
            assert!(error.contains(named), "{text}: {error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn whatever_is_written_is_sizes_or_an_error(text in "[0-9KMGTkibx.,* -]{0,24}") {
            if let Ok(Sizes(sizes)) = parse_sizes(&text) {
                assert!(!sizes.is_empty() && sizes.is_sorted_by(|a, b| a < b), "{text:?}");
                assert!(sizes.iter().all(|size| *size >= LINE && size % LINE == 0 && *size <= LARGEST), "{text:?}");
            }
        }
    }

    #[test]
    fn sizes_are_shown_in_the_largest_unit_that_divides_them() {
        for (bytes, text) in
            [(0, "0 B"), (64, "64 B"), (65_536, "64 KiB"), (100 << 10, "100 KiB"), (3 << 30, "3 GiB")]
        {
            assert_eq!(show(bytes), text);
        }
    }
}
