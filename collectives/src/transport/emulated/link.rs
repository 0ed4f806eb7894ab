//! What a link is like, as users write it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A path for messages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hop {
    /// From a message's departure to the arrival of its first byte.
    pub latency: Duration,
    /// Bytes per second in each direction of a port; infinite where none was given.
    pub bandwidth: f64,
}

impl Hop {
    const FREE: Hop = Hop { latency: Duration::ZERO, bandwidth: f64::INFINITY };

    /// Nanoseconds for which `bytes` keep a port.
    pub(super) fn port_time(&self, bytes: usize) -> u64 {
        (bytes as f64 / self.bandwidth * 1e9).ceil() as u64
    }

    /// Nanoseconds from the first byte's departure to its arrival.
    pub(super) fn flight_time(&self) -> u64 {
        self.latency.as_nanos() as u64
    }
}

/// The links of a cluster, written `latency=20us,bandwidth=1.25GB/s`, and if wanted `hops=2`, `inside-latency=1us`,
/// `inside-bandwidth=20GB/s`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Between nodes; its latency is that of all `hops` together.
    pub between: Hop,
    /// Links that a message between nodes passes one after the other.
    pub hops: u32,
    /// Inside a node; None where messages there are as fast as they are.
    pub inside: Option<Hop>,
}

const KEYS: [&str; 5] = ["latency", "bandwidth", "hops", "inside-latency", "inside-bandwidth"];

impl FromStr for Link {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut link = Link { between: Hop::FREE, hops: 1, inside: None };
        let mut known = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (key, value) = part
                .split_once('=')
                .map(|(key, value)| (key.trim(), value.trim()))
                .ok_or_else(|| format!("'{part}' is not like latency=20us or bandwidth=1.25GB/s"))?;
            if known.contains(&key) {
                return Err(format!("{key} is given twice"));
            }
            known.push(key);
            let mut inside = link.inside.unwrap_or(Hop::FREE);
            match key {
                "latency" => link.between.latency = duration(value)?,
                "bandwidth" => link.between.bandwidth = bandwidth(value)?,
                "hops" => {
                    let hops = value.parse::<u32>().ok().filter(|hops| (1..=1000).contains(hops));
                    link.hops = hops.ok_or_else(|| format!("hops={value} is not a number from 1 to 1000"))?;
                }
                "inside-latency" => inside.latency = duration(value)?,
                "inside-bandwidth" => inside.bandwidth = bandwidth(value)?,
                _ => return Err(format!("{key} is unknown; there are {}", KEYS.join(", "))),
            }
            if key.starts_with("inside-") {
                link.inside = Some(inside);
            }
        }
        link.between.latency *= link.hops;
        Ok(link)
    }
}

impl fmt::Display for Link {
    /// As it is read, without spaces.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "latency={}", time(self.between.latency / self.hops))?;
        if self.between.bandwidth.is_finite() {
            write!(f, ",bandwidth={}GB/s", self.between.bandwidth / 1e9)?;
        }
        if self.hops != 1 {
            write!(f, ",hops={}", self.hops)?;
        }
        let Some(inside) = self.inside else { return Ok(()) };
        write!(f, ",inside-latency={}", time(inside.latency))?;
        if inside.bandwidth.is_finite() {
            write!(f, ",inside-bandwidth={}GB/s", inside.bandwidth / 1e9)?;
        }
        Ok(())
    }
}

fn time(latency: Duration) -> String {
    match latency.as_nanos() {
        n if n.is_multiple_of(1000) => format!("{}us", n / 1000),
        n => format!("{n}ns"),
    }
}

/// A non-negative number and its unit, out of `units` of name and factor.
fn quantity(value: &str, units: &[(&str, f64)], example: &str) -> Result<f64, String> {
    let split = value.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(value.len());
    let (number, unit) = value.split_at(split);
    let factor = units.iter().find(|(name, _)| *name == unit.trim()).map(|(_, factor)| factor);
    match (number.parse::<f64>(), factor) {
        (Ok(number), Some(factor)) if number.is_finite() => Ok(number * factor),
        _ => {
            let names: Vec<&str> = units.iter().map(|(name, _)| *name).collect();
            Err(format!("'{value}' is not like {example}; units are {}", names.join(", ")))
        }
    }
}

fn duration(value: &str) -> Result<Duration, String> {
    let seconds = quantity(value, &[("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)], "20us")?;
    match seconds <= 60.0 {
        true => Ok(Duration::from_nanos((seconds * 1e9).round() as u64)),
        false => Err(format!("a latency of {value} is more than a minute")),
    }
}

fn bandwidth(value: &str) -> Result<f64, String> {
    const UNITS: [(&str, f64); 10] = [
        ("B/s", 1.0),
        ("kB/s", 1e3),
        ("MB/s", 1e6),
        ("GB/s", 1e9),
        ("KiB/s", 1024.0),
        ("MiB/s", 1_048_576.0),
        ("GiB/s", 1_073_741_824.0),
        ("kbit/s", 125.0),
        ("Mbit/s", 125e3),
        ("Gbit/s", 125e6),
    ];
    let bytes = quantity(value, &UNITS, "1.25GB/s")?;
    match bytes >= 1.0 {
        true => Ok(bytes),
        false => Err(format!("a bandwidth of {value} is less than a byte per second")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(text: &str) -> Link {
        text.parse().unwrap()
    }

    #[test]
    fn links_are_read_and_written() {
        let l = link("latency=20us,bandwidth=1.25GB/s");
        assert_eq!(l.between, Hop { latency: Duration::from_micros(20), bandwidth: 1.25e9 });
        assert_eq!((l.hops, l.inside), (1, None));
        assert_eq!(link("bandwidth=10Gbit/s"), link("latency=0s,bandwidth=1.25GB/s"));
        assert_eq!(link("latency=1.5ms").between.latency, Duration::from_micros(1500));
        assert!(link("latency=1.5ms").between.bandwidth.is_infinite());
        assert_eq!(link(" hops=3, latency = 5us ").between.latency, Duration::from_micros(15));
        let inside = link("latency=5us,inside-bandwidth=20GB/s").inside.unwrap();
        assert_eq!(inside, Hop { latency: Duration::ZERO, bandwidth: 20e9 });
        for text in [
            "latency=20us,bandwidth=1.25GB/s",
            "latency=3ns,hops=2",
            "latency=1us,bandwidth=12.5GB/s,inside-latency=300ns,inside-bandwidth=20GB/s",
        ] {
            assert_eq!(link(text).to_string(), text);
        }
    }

    #[test]
    fn nonsense_is_named() {
        for (text, words) in [
            ("", "'' is not like"),
            ("20us", "'20us' is not like"),
            ("latency=20us,", "'' is not like"),
            ("latency=20", "units are ns, us, ms, s"),
            ("latency=-1us", "'-1us' is not like 20us"),
            ("latency=61s", "more than a minute"),
            ("latency=1..5us", "'1..5us' is not like 20us"),
            ("bandwidth=fast", "'fast' is not like 1.25GB/s"),
            ("bandwidth=0GB/s", "less than a byte"),
            ("latency=1us,latency=2us", "latency is given twice"),
            ("hops=0", "hops=0 is not a number from 1"),
            ("inside-latency=x", "'x' is not like 20us"),
            ("jitter=1us", "jitter is unknown; there are latency, bandwidth, hops"),
        ] {
            let error = text.parse::<Link>().unwrap_err();
            assert!(error.contains(words) && !error.contains('\n'), "{error}");
        }
    }
}
