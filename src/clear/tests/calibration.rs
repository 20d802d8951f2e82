//! A calibration printed, saved, read back, and brought to another machine.

use super::decide::{any_measurement, nothing};
use super::{boastful, methods_here};
use crate::clear::decide::{Measurement, Readings};
use crate::clear::{Calibration, Clearer, Concurrency, CpuDescription, Method, Reuse, Situation, lacks_here};
use crate::error::{CalibrationError, MethodError};

/// Of so many workers, with two classes measured.
fn small(workers: usize) -> Calibration {
    let read = |situation, size_class, rates: &[(Method, f64)]| {
        let rates = rates.iter();
        let readings = rates.map(move |&(method, rate)| Readings {
            situation,
            size_class,
            method,
            gb_per_s: vec![rate; 2],
        });
        readings.collect::<Vec<_>>()
    };
    let rates = [(Method::RepStosb, 1234.5), (Method::Sse2, 9.94), (Method::Movdir64b, 1220.0)];
    let readings = [
        read(Situation::ALL[0], 4096, &rates),
        read(Situation::ALL[0], 16_384, &rates[..2]),
        read(Situation::ALL[1], 4096, &rates[1..]),
    ];
    let mut calibration = Measurement {
        readings: readings.concat(),
        workers,
        classes: vec![4096, 16_384],
        scaling: vec![(1, vec![10.0]), (2, vec![19.5])],
        ..nothing()
    }
    .decide();
    calibration.cpu = CpuDescription { family: 26, model: 2, ..boastful() };
    calibration
}

#[test]
fn prints_as_tables() {
    let wanted = "\
Amd family 26 model 2, pages of 2 MiB, 49 of 50 ms; GB/s, the choice in brackets

cold memory, 1 worker  rep-stosb    sse2  movdir64b
  from    2 KiB           1234.5     9.9    [1220.0]  movdir64b, as fast, and gentler
  from    8 KiB          [1234.5]    9.9          -   rep-stosb, the fastest

cold memory, 2 workers   sse2  movdir64b
  from    2 KiB           9.9    [1220.0]  movdir64b, the fastest
  from    8 KiB             -          -   rep-stosb, by rule: too little time

read soon, 1 worker
  from    2 KiB         rep-stosb, by rule: too little time
  from    8 KiB         rep-stosb, by rule: too little time

read soon, 2 workers
  from    2 KiB         rep-stosb, by rule: too little time
  from    8 KiB         rep-stosb, by rule: too little time

workers a node: 8 (1: 10.0 GB/s, 2: 19.5 GB/s)";
    assert_eq!(small(2).to_string(), wanted, "\n{}", small(2));
    let alone = small(1).to_string();
    assert!(alone.contains("cold memory, 1 worker") && !alone.contains("workers\n"), "{alone}");
    let choice = small(2).choices()[0].to_string();
    assert_eq!(choice, "as fast, and gentler (rep-stosb 1234.5 GB/s, movdir64b 1220.0, sse2 9.9)");
}

/// On the model that it was measured on, whatever else the CPU says; on another one only by force.
#[test]
fn another_model_is_refused_unless_forced() {
    let calibration = small(2).with_method(Reuse::Cold, .., Method::RepStosq);
    let measured_on = calibration.cpu().clone();
    let mut narrower = measured_on.clone();
    (narrower.llc_bytes, narrower.avx512f) = (Some(7), false);
    assert!(Clearer::by_calibration(&calibration, &narrower).is_ok());
    let others = [
        CpuDescription { family: 25, ..measured_on.clone() },
        CpuDescription { model: 3, ..measured_on.clone() },
        CpuDescription { vendor: crate::clear::Vendor::Hygon, ..measured_on.clone() },
    ];
    for other in others {
        let refused = Clearer::by_calibration(&calibration, &other).unwrap_err();
        assert!(matches!(&refused, CalibrationError::OtherCpu { .. }), "{refused}");
        let (refused, model) = (refused.to_string(), other.model_name());
        assert!(refused.contains("measured on Amd family 26 model 2 and"), "{refused}");
        assert!(refused.contains(&model) && refused.contains("calibration_of_another_cpu"), "{refused}");
        let forced = Clearer::by_foreign_calibration(&calibration, &other);
        assert_eq!(forced.method_for(4096, Reuse::Cold, Concurrency::One), Method::RepStosq);
    }
}

/// R13, R14: a calibration gets no method run that the description or the CPU lacks.
#[test]
fn a_method_that_is_not_there_is_refused_or_ruled() {
    for method in Method::ALL {
        let calibration = small(2).with_method(Reuse::Cold, .., method).with_method(Reuse::Soon, .., method);
        let mut cpu = calibration.cpu().clone();
        if lacks_here(method).is_none() {
            assert!(Clearer::by_calibration(&calibration, &cpu).is_ok(), "{method}");
        }
        let bare = CpuDescription::bare();
        (cpu.avx2, cpu.avx512f, cpu.clzero, cpu.movdir64b) = (false, false, false, false);
        let refused = Clearer::by_calibration(&calibration, &cpu);
        if bare.supports(method).is_ok() {
            assert!(refused.is_ok(), "{method}");
            continue;
        }
        let refused = refused.unwrap_err();
        let CalibrationError::Method(MethodError::Unavailable { asked, .. }) = &refused else {
            panic!("{refused}");
        };
        assert_eq!(*asked, method);
        let forced = Clearer::by_foreign_calibration(&calibration, &cpu);
        for (len, reuse) in
            [(1, Reuse::Soon), (4096, Reuse::Cold), (16_384, Reuse::Soon), (1 << 40, Reuse::Cold)]
        {
            let run = forced.method_for(len, reuse, Concurrency::All);
            assert!(cpu.supports(run).is_ok() && methods_here().contains(&run), "{run} for {method}");
            assert_eq!(run, cpu.choose(len, reuse), "the rule takes the place of {method}");
        }
    }
}

#[cfg(feature = "serde")]
mod saved {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn read(saved: Value) -> Result<Calibration, String> {
        serde_json::from_value(saved).map_err(|error| error.to_string())
    }

    proptest! {
        #[test]
        fn what_is_saved_is_read_back(measurement in any_measurement(), method in prop::sample::select(Method::ALL.to_vec())) {
            let calibration = measurement.decide();
            for calibration in [calibration.clone(), calibration.with_method(Reuse::Soon, 8192.., method)] {
                let text = serde_json::to_string(&calibration).unwrap();
                let read: Calibration = serde_json::from_str(&text).unwrap();
                prop_assert_eq!(&read, &calibration);
                prop_assert_eq!(read.to_string(), calibration.to_string());
            }
        }
    }

    /// Each of them alone makes it no calibration.
    #[test]
    fn poison_is_refused() {
        type Poison = (&'static str, fn(&mut Value), &'static str);
        let poisons: [Poison; 21] = [
            ("no choices", |saved| saved["choices"] = json!([]), "chooses nothing"),
            (
                "no choice for one situation",
                |saved| drop(saved["choices"].as_array_mut().unwrap().drain(6..)),
                "chooses nothing",
            ),
            ("unordered", |saved| saved["choices"].as_array_mut().unwrap().swap(0, 1), "do not ascend"),
            ("a class twice", |saved| saved["choices"][1] = saved["choices"][0].clone(), "do not ascend"),
            (
                "a class twice, from elsewhere on",
                |saved| saved["choices"][1]["size_class"] = json!(4096),
                "from 8192 bytes on only",
            ),
            (
                "a class twice, behind",
                |saved| {
                    saved["choices"][0]["size_class"] = json!(16_384);
                },
                "do not ascend",
            ),
            (
                "from behind its class",
                |saved| saved["choices"][1]["from_bytes"] = json!(16_385),
                "from 16385 bytes on only",
            ),
            ("an absurd size", |saved| saved["choices"][1]["size_class"] = json!(u64::MAX), "never measured"),
            ("a negative speed", |saved| saved["choices"][0]["gb_per_s"] = json!(-1.0), "-1 is no speed"),
            (
                "no speed",
                |saved| saved["choices"][0]["measured"][1]["gb_per_s"] = json!(0.0),
                "0 is no speed",
            ),
            ("a speed that is no number", |saved| saved["scaling"][0]["gb_per_s"] = json!(f64::NAN), ""),
            (
                "a method twice",
                |saved| {
                    saved["choices"][0]["measured"][1] = saved["choices"][0]["measured"][0].clone();
                },
                "listed twice",
            ),
            ("an unknown method", |saved| saved["choices"][0]["method"] = json!("memset"), "memset"),
            ("an unknown reason", |saved| saved["choices"][0]["reason"] = json!("because"), "because"),
            ("no workers", |saved| saved["workers"] = json!(0), "no worker"),
            ("no workers a node", |saved| saved["workers_per_node"] = json!(0), "no worker"),
            ("a worker count twice", |saved| saved["scaling"][1]["workers"] = json!(1), "do not ascend"),
            ("the speed of no worker", |saved| saved["scaling"][0]["workers"] = json!(0), "no worker"),
            ("no size of a page", |saved| saved["page_bytes"] = json!(0), "no size of a page"),
            ("a strange size of a page", |saved| saved["page_bytes"] = json!(12_288), "no size of a page"),
            ("a part of it", |saved| drop(saved.as_object_mut().unwrap().remove("scaling")), "scaling"),
        ];
        let saved = serde_json::to_value(small(2)).unwrap();
        assert_eq!(read(saved.clone()).unwrap(), small(2));
        for (name, poison, says) in poisons {
            let mut poisoned = saved.clone();
            poison(&mut poisoned);
            assert_ne!(poisoned, saved, "{name}");
            let refused = read(poisoned).map(|_| name).unwrap_err();
            assert!(refused.contains(says), "{name}: {refused}");
            assert!(
                says.is_empty() || !refused.contains("no calibration") || refused.contains("save one again")
            );
        }
        let text = serde_json::to_string(&small(2)).unwrap();
        assert!(serde_json::from_str::<Calibration>(&text.replace("19.5", "1e999")).is_err());
        // JSON has no such numbers; formats that have them are refused, too.
        for nonsense in [f64::NAN, f64::INFINITY, -f64::INFINITY] {
            let mut poisoned = small(2);
            poisoned.choices[0].measured[0].gb_per_s = nonsense;
            assert!(poisoned.what_is_wrong().unwrap().contains("no speed"));
        }
    }
}
