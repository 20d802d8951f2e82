//! Who clears.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};
use vm_zeroing::{
    Calibration, Clearer, Concurrency, CpuDescription, Method, MethodError, RequestError, Reuse,
};

use crate::Failure;
use crate::raw::Part;

/// One word of `--methods`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entrant {
    Method(Method),
    Memset,
    WriteBytes,
    /// The rule and the calibration, each with both hints.
    Auto,
}

/// A word of `--methods` that is none.
#[derive(Debug, thiserror::Error)]
#[error("{0}, memset, write-bytes, auto")]
pub struct EntrantError(MethodError);

impl FromStr for Entrant {
    type Err = EntrantError;

    fn from_str(text: &str) -> Result<Self, EntrantError> {
        match text.trim().to_ascii_lowercase().as_str() {
            "memset" => Ok(Entrant::Memset),
            "write-bytes" => Ok(Entrant::WriteBytes),
            "auto" => Ok(Entrant::Auto),
            name => name.parse().map(Entrant::Method).map_err(EntrantError),
        }
    }
}

/// What a contestant is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// One method of the library.
    Method,
    /// `libc::memset` and `ptr::write_bytes`.
    Foreign,
    /// `Auto` by rule.
    Auto,
    /// `Auto` by calibration.
    Calibrated,
    /// `Auto` by rule, told the opposite of what the memory is.
    AutoWrongHint,
    /// `Auto` by calibration, told the opposite of what the memory is.
    CalibratedWrongHint,
}

/// What the memory is before it is cleared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Stale bytes in no cache.
    Cold,
    /// Stale bytes just written through the caches.
    Hot,
}

impl State {
    /// What a caller should say of it.
    pub fn hint(self) -> Reuse {
        match self {
            State::Cold => Reuse::Cold,
            State::Hot => Reuse::Soon,
        }
    }

    pub fn wrong_hint(self) -> Reuse {
        match self {
            State::Cold => Reuse::Soon,
            State::Hot => Reuse::Cold,
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            State::Cold => "cold",
            State::Hot => "hot",
        })
    }
}

/// One who clears.
#[derive(Debug, Clone)]
pub struct Contestant {
    pub name: String,
    pub kind: Kind,
    /// Which method stores, where it is one of the library's.
    pub method: Option<Method>,
    way: Way,
}

#[derive(Debug, Clone)]
enum Way {
    Library(Clearer, Reuse),
    Memset,
    WriteBytes,
}

impl Contestant {
    /// One method alone.
    pub fn method(method: Method) -> Result<Self, Failure> {
        let clearer = Clearer::with_method(method).map_err(Failure::input)?;
        let way = Way::Library(clearer, Reuse::Cold);
        Ok(Self { name: method.to_string(), kind: Kind::Method, method: Some(method), way })
    }

    fn foreign(name: &str, way: Way) -> Self {
        Self { name: name.to_owned(), kind: Kind::Foreign, method: None, way }
    }

    /// `Auto` for calls of `len` bytes by so many threads.
    fn auto(kind: Kind, clearer: &Clearer, reuse: Reuse, len: u64, threads: usize) -> Result<Self, Failure> {
        let concurrency = if threads == 1 { Concurrency::One } else { Concurrency::All };
        let method = clearer.method_for(len, reuse, concurrency);
        // A clearer by itself knows of one thread; what a service would run with all of them is one method.
        let clearer = if threads == 1 { clearer.clone() } else { Clearer::with_method(method)? };
        let name = match kind {
            Kind::Calibrated => "Auto, calibrated",
            Kind::AutoWrongHint => "Auto, wrong hint",
            Kind::CalibratedWrongHint => "calibrated, wrong hint",
            _ => "Auto",
        };
        Ok(Self { name: name.to_owned(), kind, method: Some(method), way: Way::Library(clearer, reuse) })
    }

    /// Clears a run of a part.
    pub fn clear(&self, part: &mut Part<'_>, at: u64, len: u64) -> Result<(), RequestError> {
        match &self.way {
            Way::Library(clearer, reuse) => part.clear(clearer, at, len, *reuse).map(drop),
            Way::Memset => {
                part.memset(at, len);
                Ok(())
            }
            Way::WriteBytes => {
                part.write_bytes(at, len);
                Ok(())
            }
        }
    }
}

/// Who takes part, before the lengths are known.
#[derive(Debug)]
pub struct Field {
    entrants: Vec<Entrant>,
    rule: Clearer,
    calibrated: Clearer,
}

impl Field {
    /// Those asked for, or everybody. The yardstick is always there.
    pub fn new(asked: &[Entrant], calibration: &Calibration) -> Result<Self, Failure> {
        let offered = CpuDescription::detect().methods();
        let everybody = || {
            let methods = offered.iter().map(|method| Entrant::Method(*method));
            methods.chain([Entrant::Memset, Entrant::WriteBytes, Entrant::Auto]).collect()
        };
        let mut entrants: Vec<Entrant> = if asked.is_empty() { everybody() } else { Vec::new() };
        for entrant in std::iter::once(&Entrant::Method(yardstick())).chain(asked) {
            if let Entrant::Method(method) = entrant {
                Clearer::with_method(*method).map_err(Failure::input)?;
            }
            if !entrants.contains(entrant) {
                entrants.push(*entrant);
            }
        }
        Ok(Self {
            entrants,
            rule: Clearer::auto(),
            calibrated: Clearer::calibrated(calibration).map_err(Failure::input)?,
        })
    }

    /// The contestants for calls of `len` bytes.
    pub fn contestants(&self, state: State, len: u64, threads: usize) -> Result<Vec<Contestant>, Failure> {
        let mut all = Vec::new();
        for entrant in &self.entrants {
            match entrant {
                Entrant::Method(method) => all.push(Contestant::method(*method)?),
                Entrant::Memset => all.push(Contestant::foreign("libc::memset", Way::Memset)),
                Entrant::WriteBytes => all.push(Contestant::foreign("ptr::write_bytes", Way::WriteBytes)),
                Entrant::Auto => {
                    for (kind, clearer, hint) in [
                        (Kind::Auto, &self.rule, state.hint()),
                        (Kind::Calibrated, &self.calibrated, state.hint()),
                        (Kind::AutoWrongHint, &self.rule, state.wrong_hint()),
                        (Kind::CalibratedWrongHint, &self.calibrated, state.wrong_hint()),
                    ] {
                        all.push(Contestant::auto(kind, clearer, hint, len, threads)?);
                    }
                }
            }
        }
        Ok(all)
    }

    /// The lengths within `from ..= to` at which the rule and the calibration change their choice.
    pub fn crossovers(&self, reuse: Reuse, threads: usize, from: u64, to: u64) -> Vec<Crossover> {
        if !self.entrants.contains(&Entrant::Auto) {
            return Vec::new();
        }
        let concurrency = if threads == 1 { Concurrency::One } else { Concurrency::All };
        let of = |chooser: &'static str, clearer: &Clearer| {
            crossovers(from, to, |len| clearer.method_for(len, reuse, concurrency))
                .into_iter()
                .map(move |(from_bytes, before, after)| Crossover { chooser, from_bytes, before, after })
                .collect::<Vec<_>>()
        };
        let mut all = of("Auto", &self.rule);
        all.extend(of("Auto, calibrated", &self.calibrated));
        all
    }
}

/// A length from which on another method is chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Crossover {
    pub chooser: &'static str,
    pub from_bytes: u64,
    #[serde(serialize_with = "name")]
    pub before: Method,
    #[serde(serialize_with = "name")]
    pub after: Method,
}

/// A method by its name.
pub fn name<S: Serializer>(method: &Method, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(method.name())
}

/// Where `choice` changes: looks at every power of two, then between two that differ.
fn crossovers(from: u64, to: u64, choice: impl Fn(u64) -> Method) -> Vec<(u64, Method, Method)> {
    let powers = (0..63).map(|log| 1 << log).filter(|power| (from + 1..to).contains(power));
    let mut found = Vec::new();
    let mut low = from;
    for high in powers.chain([to]) {
        let (before, after) = (choice(low), choice(high));
        if before != after {
            let (mut still, mut changed) = (low, high);
            while changed - still > 1 {
                let middle = still + (changed - still) / 2;
                if choice(middle) == before { still = middle } else { changed = middle }
            }
            found.push((changed, before, choice(changed)));
        }
        low = high;
    }
    found
}

/// What all others are compared with.
pub fn yardstick() -> Method {
    if cfg!(target_arch = "x86_64") { Method::RepStosb } else { Method::Portable }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entrants_have_names_and_others_are_refused_with_all_of_them() {
        for (text, entrant) in [
            ("rep-stosb", Entrant::Method(Method::RepStosb)),
            (" CLZERO ", Entrant::Method(Method::Clzero)),
            ("memset", Entrant::Memset),
            ("write-bytes", Entrant::WriteBytes),
            ("auto", Entrant::Auto),
        ] {
            assert_eq!(text.parse::<Entrant>().unwrap(), entrant, "{text}");
        }
        let error = "rep-movsb".parse::<Entrant>().unwrap_err().to_string();
        for named in ["\"rep-movsb\"", "rep-stosq", "portable, memset, write-bytes, auto"] {
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn crossovers_are_found_to_the_byte() {
        let choice = |len: u64| match len {
            0..70_000 => Method::RepStosb,
            70_000..4_194_304 => Method::Clzero,
            _ => Method::Avx2,
        };
        assert_eq!(
            crossovers(4096, 1 << 30, choice),
            [(70_000, Method::RepStosb, Method::Clzero), (4_194_304, Method::Clzero, Method::Avx2)]
        );
        assert_eq!(crossovers(80_000, 80_000, choice), []);
        assert_eq!(crossovers(1 << 23, 1 << 30, choice), []);
    }
}
