//! Where the memory of a job lies.

use vm_zeroing::NodeId;

use crate::host::Host;

/// A region of the job.
#[derive(Debug, Clone)]
struct Region {
    len: u64,
    believed: Option<NodeId>,
    /// Where each part begins, and the index of its node.
    parts: Vec<(u64, usize)>,
}

/// What is to be cleared. Nodes are indexed as the host does.
#[derive(Debug, Clone)]
pub struct Layout {
    regions: Vec<Region>,
    nodes: usize,
    /// The nodes that hold memory.
    holders: Vec<usize>,
    misplaced: f64,
    seed: u64,
    /// A power of two: bytes that lie on one node, in a row.
    cell: u64,
}

/// How memory is laid out.
#[derive(Debug, Clone)]
pub struct Plot {
    /// Bytes of all regions.
    pub memory: u64,
    /// The part of the memory that each node holds, by its index.
    pub weights: Vec<(usize, f64)>,
    pub regions_per_node: u32,
    /// One region over all nodes whose memory policy names none of them.
    pub unknown: bool,
    /// The part of the memory that lies on another node than its policy says.
    pub misplaced: f64,
    pub seed: u64,
    /// No chunk is longer, in bytes: a power of two.
    pub chunk: u64,
}

/// Pages are 4 KiB at least.
const PAGE: u64 = 4096;

impl Layout {
    pub fn new(host: &Host, plot: &Plot) -> Self {
        let grain = if plot.unknown { plot.chunk } else { PAGE };
        let total: f64 = plot.weights.iter().map(|(_, weight)| weight).sum();
        let (mut sum, mut begun) = (0.0, 0);
        let mut parts = Vec::new();
        for (number, (node, weight)) in plot.weights.iter().enumerate() {
            sum += weight;
            let end = (plot.memory as f64 * (sum / total) / grain as f64).round() as u64 * grain;
            let last = number + 1 == plot.weights.len();
            let end = if last { plot.memory } else { end.clamp(begun, plot.memory) };
            parts.push((*node, begun, end));
            begun = end;
        }
        parts.retain(|(_, start, end)| start < end);
        let holders = parts.iter().map(|(node, _, _)| *node).collect();
        let regions = if plot.unknown {
            let parts = parts.iter().map(|(node, start, _)| (*start, *node)).collect();
            vec![Region { len: plot.memory, believed: None, parts }]
        } else {
            parts
                .iter()
                .flat_map(|(node, start, end)| regions(host.id(*node), *node, end - start, plot))
                .collect()
        };
        let Plot { misplaced, seed, chunk, .. } = *plot;
        Self { regions, nodes: host.nodes(), holders, misplaced, seed, cell: chunk }
    }

    /// Length and believed node of each region.
    pub fn regions(&self) -> impl Iterator<Item = (u64, Option<NodeId>)> {
        self.regions.iter().map(|region| (region.len, region.believed))
    }

    pub fn bytes(&self) -> u64 {
        self.regions.iter().map(|region| region.len).sum()
    }

    /// The node of a byte of a region, and so of the rest of its cell.
    pub fn node_of(&self, region: u32, at: u64) -> usize {
        let parts = &self.regions[region as usize].parts;
        let node = parts[parts.partition_point(|(start, _)| *start <= at) - 1].1;
        if self.misplaced == 0.0 || self.holders.len() < 2 {
            return node;
        }
        let dice = mixed(self.seed ^ mixed((u64::from(region) << 44) ^ (at / self.cell)));
        if (dice >> 11) as f64 / (1u64 << 53) as f64 >= self.misplaced {
            return node;
        }
        // Any of the others.
        let others = self.holders.len() as u64 - 1;
        let other = self.holders[(mixed(dice) % others) as usize];
        if other == node { self.holders[others as usize] } else { other }
    }

    /// Runs of bytes on one node, of all regions one after the other, between two bytes of their sum.
    pub fn runs(&self, from: u64, to: u64) -> Runs<'_> {
        let mut runs = Runs { layout: self, region: 0, at: from, left: to.saturating_sub(from) };
        while let Some(region) = self.regions.get(runs.region).filter(|region| runs.at >= region.len) {
            runs.at -= region.len;
            runs.region += 1;
        }
        runs
    }

    /// How much lies on each node.
    pub fn bytes_by_node(&self) -> Vec<u64> {
        let mut bytes = vec![0; self.nodes];
        for (node, len) in self.runs(0, self.bytes()) {
            bytes[node] += len;
        }
        bytes
    }
}

/// Several regions of one node, as equal as whole pages are.
fn regions(id: NodeId, node: usize, bytes: u64, plot: &Plot) -> impl Iterator<Item = Region> {
    let count = u64::from(plot.regions_per_node.max(1));
    let cut = move |number: u64| {
        let pages = u128::from(bytes.div_ceil(PAGE)) * u128::from(number) / u128::from(count);
        (pages as u64 * PAGE).min(bytes)
    };
    let lens = (0..count).map(move |number| cut(number + 1) - cut(number)).filter(|len| *len > 0);
    lens.map(move |len| Region { len, believed: Some(id), parts: vec![(0, node)] })
}

/// See [`Layout::runs`].
#[derive(Debug)]
pub struct Runs<'l> {
    layout: &'l Layout,
    region: usize,
    at: u64,
    left: u64,
}

impl Iterator for Runs<'_> {
    type Item = (usize, u64);

    fn next(&mut self) -> Option<(usize, u64)> {
        let region = self.layout.regions.get(self.region).filter(|_| self.left > 0)?;
        let node = self.layout.node_of(self.region as u32, self.at);
        let part = region.parts.iter().map(|(start, _)| *start).find(|start| *start > self.at);
        let mut end = part.unwrap_or(region.len).min(region.len);
        if self.layout.misplaced > 0.0 {
            end = end.min((self.at / self.layout.cell + 1) * self.layout.cell);
        }
        let len = (end - self.at).min(self.left);
        self.left -= len;
        self.at += len;
        if self.at == region.len {
            (self.region, self.at) = (self.region + 1, 0);
        }
        Some((node, len))
    }
}

/// A number that looks like chance and is always the same (SplitMix64's finalizer; Steele, Lea, Flood 2014).
pub fn mixed(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
