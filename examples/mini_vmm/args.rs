//! The command line.

use std::fmt;

use clap::{Parser, ValueEnum};

/// Boots VM after VM on the same memory and shows that none of them sees a byte of the one before.
///
/// Exit status: 0 when every word that every guest read was zero, 1 when any was not, 2 on an error.
#[derive(Debug, Clone, Parser)]
#[command(name = "mini_vmm")]
pub struct Args {
    /// RAM of each VM: bytes, or a number with K, M, G or T (powers of 1024)
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_size)]
    pub memory: u64,

    /// How often VM A's memory goes on to a VM B
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub cycles: u32,

    /// VMs at once, each on a thread and memory of its own
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub vms: u32,

    /// Pages that back guest RAM; auto takes the largest the host has free
    #[arg(long, value_name = "SIZE", value_enum, default_value_t = PageSizeArg::Auto)]
    pub page_size: PageSizeArg,

    /// Clearing method: auto, rep-stosb, rep-stosq, movnti, sse2, avx2, avx512, clzero, movdir64b, portable
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub method: String,

    /// What runs as the guest; auto takes KVM where it can be opened
    #[arg(long, value_enum, default_value_t = GuestArg::Auto)]
    pub guest: GuestArg,

    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,

    /// Negative control: VM B boots on VM A's own lease, so it must find A's bytes
    #[arg(long)]
    pub no_zeroing: bool,
}

/// `--page-size`
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PageSizeArg {
    /// Ordinary pages
    #[value(name = "4k")]
    Small,
    /// 2 MiB hugepages
    #[value(name = "2m")]
    Huge2M,
    /// 1 GiB hugepages
    #[value(name = "1g")]
    Huge1G,
    /// The largest that the host has free
    Auto,
}

/// `--guest`
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GuestArg {
    /// Guest code on a KVM vCPU
    Kvm,
    /// A host thread over the same memory
    Thread,
    /// KVM where it can be opened, else a host thread
    Auto,
}

/// Guest RAM comes in whole small pages.
const SMALL_PAGE: u64 = 4096;

/// A size in bytes that is not one.
#[derive(Debug, Clone, PartialEq, Eq)]
enum SizeError {
    NoNumber(String),
    Unit(String),
    TooLarge(String),
    NotPages(u64),
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNumber(text) => {
                write!(f, "{text:?} does not begin with a number; write 512M or 536870912")
            }
            Self::Unit(unit) => write!(f, "{unit:?} is no unit; the units are K, M, G and T"),
            Self::TooLarge(text) => write!(f, "{text} is more than 64 bits of bytes can count"),
            Self::NotPages(bytes) => {
                write!(f, "{bytes} bytes are no whole number of {SMALL_PAGE}-byte pages (at least one)")
            }
        }
    }
}

impl std::error::Error for SizeError {}

/// `512M`, `1g`, `64KiB`, `4096`: a whole number of bytes and of small pages.
fn parse_size(text: &str) -> Result<u64, SizeError> {
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
    let too_large = || SizeError::TooLarge(text.to_owned());
    let bytes =
        number.parse::<u64>().map_err(|_| too_large())?.checked_mul(1 << shift).ok_or_else(too_large)?;
    if bytes == 0 || bytes % SMALL_PAGE != 0 {
        return Err(SizeError::NotPages(bytes));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn sizes_are_bytes_or_carry_a_unit() {
        for (text, bytes) in [
            ("4096", 4096),
            ("64K", 65_536),
            ("512M", 512 << 20),
            ("1g", 1 << 30),
            ("2 GiB", 2 << 30),
            ("1T", 1 << 40),
            (" 16mib ", 16 << 20),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn a_wrong_size_is_named() {
        for (text, named) in [
            ("", "does not begin with a number"),
            ("M", "does not begin with a number"),
            ("-4096", "does not begin with a number"),
            ("12Q", "\"Q\" is no unit"),
            ("1.5G", "\".5G\" is no unit"),
            ("0", "0 bytes"),
            ("0M", "0 bytes"),
            ("4097", "4097 bytes"),
            ("18446744073709551616", "more than 64 bits"),
            ("16777216T", "more than 64 bits"),
        ] {
            let error = parse_size(text).expect_err(text).to_string();
            assert!(error.contains(named), "{text}: {error}");
        }
    }

    #[test]
    fn defaults_are_those_of_the_manual() {
        Args::command().debug_assert();
        let args = Args::parse_from(["mini_vmm"]);
        assert_eq!((args.memory, args.cycles, args.vms), (512 << 20, 3, 1));
        assert_eq!((args.page_size, args.guest), (PageSizeArg::Auto, GuestArg::Auto));
        assert_eq!((args.method.as_str(), args.json, args.no_zeroing), ("auto", false, false));
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [["--cycles", "0"], ["--vms", "0"], ["--page-size", "3m"], ["--guest", "xen"]] {
            assert!(Args::try_parse_from(["mini_vmm", bad[0], bad[1]]).is_err(), "{bad:?}");
        }
    }
}
