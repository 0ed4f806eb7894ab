//! Streams that gather their work, on a driver that runs on the processor: what it is given, in which order, what becomes a
//! graph, and when memory is freed.

use collectives::device::cuda::{Event, Gpu, Stream, Urgency};
use collectives::device::{Cache, Launch, Module, PRODUCT_WORKSPACE, Product, Queue};
use collectives::{Buffer, DType};
use harness::Counting;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

#[global_allocator]
static COUNTING: Counting = Counting;

/// A folder with the libraries, the log and the kernels, if there can be one.
fn faked() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_graphs");
    let folder =
        harness::fake_cuda("streams that gather their work", folder, &["driver", "nvrtc", "cublaslt"])?;
    let _ = std::fs::remove_file(folder.join("log"));
    // SAFETY: the only test of this program, before any other thread is started.
    unsafe {
        std::env::set_var("CARAVAN_CUDA_LIBRARIES", &folder);
        std::env::set_var("FAKE_CUDA_LOG", folder.join("log"));
        // The second of a list that is being recorded, towards the end of the test.
        std::env::set_var("FAKE_CUDA_REFUSE", "reduce:333");
    }
    Some(folder)
}

/// What the driver was given since the last look: work, and what became of graphs and memory.
struct Log {
    file: PathBuf,
    read: usize,
}

impl Log {
    fn new_lines(&mut self) -> (Vec<String>, Vec<String>) {
        let text = std::fs::read_to_string(&self.file).unwrap_or_default();
        let lines = text[self.read..].lines().map(str::to_owned).collect::<Vec<_>>();
        self.read = text.len();
        lines.into_iter().partition(|line| !line.starts_with('-'))
    }

    fn count(lines: &[String], word: &str) -> usize {
        lines.iter().filter(|line| line.ends_with(word)).count()
    }
}

/// A stream with something to work on.
struct Bed {
    stream: Stream,
    matrices: [Buffer<f32>; 3],
    addresses: Buffer<u64>,
}

impl Bed {
    fn new(gpu: &Gpu, gathers: bool) -> Self {
        let remarks = std::sync::mpsc::channel().0;
        let mut stream = Stream::new(gpu, Urgency::Normal).expect("a stream").gathering(gathers, &remarks);
        stream.prepare(&[Module::reduce(DType::F32)]).expect("kernels");
        for refused in [stream.memory(PRODUCT_WORKSPACE - 1), stream.host_memory(PRODUCT_WORKSPACE)] {
            let lends = AssertUnwindSafe(|| stream.lend(refused.expect("memory")));
            assert!(catch_unwind(lends).is_err(), "too short, or elsewhere");
        }
        let workspace = stream.memory(PRODUCT_WORKSPACE).expect("memory");
        stream.lend(workspace);
        let matrices = std::array::from_fn(|_| Buffer::from_memory(stream.memory(256).expect("memory")));
        let addresses = Buffer::from_memory(stream.memory(8).expect("memory"));
        Bed { stream, matrices, addresses }
    }

    /// A kernel, a product and zeros; `x` is an argument.
    fn step(&mut self, x: usize) -> collectives::Result<()> {
        self.step_of(1, x)
    }

    /// The same with so many blocks.
    fn step_of(&mut self, blocks: usize, x: usize) -> collectives::Result<()> {
        let [a, b, c] = &mut self.matrices;
        let launch = Launch::new(Module::reduce(DType::F32), KERNEL, [blocks, 1, 1], 32);
        // SAFETY: this driver runs no kernel; the matrices are as large, and stay as long as the stream.
        unsafe {
            let launch = launch.read_addresses(self.addresses.view(), 256).write(a.view_mut()).int(x);
            self.stream.launch(&launch)?;
            self.stream.product(&Product::new(
                [8, 8, 8],
                (a.view(), false),
                (b.view(), true),
                c.view_mut(),
            ))?;
            self.stream.zero(b.view_mut().as_mut_ptr() as u64, 256)
        }
    }
}

const KERNEL: &str = "reduce";

#[test]
fn what_comes_again_becomes_a_graph_and_all_else_stays_as_it_is() {
    let Some(folder) = faked() else { return };
    let gpu = Gpu::open_with(0, Cache::at(folder.join("cache"))).expect("a GPU");
    let mut log = Log { file: folder.join("log"), read: 0 };
    let [mut plain, mut bed] = [false, true].map(|gathers| Bed::new(&gpu, gathers));
    log.new_lines();

    // Nothing is given before somebody asks; then it is given in its order.
    bed.step(1).unwrap();
    bed.step(2).unwrap();
    assert_eq!(log.new_lines().0, [""; 0]);
    bed.stream.record(&Event::new(&gpu).unwrap()).unwrap();
    let given = log.new_lines().0;
    plain.step(1).unwrap();
    plain.step(2).unwrap();
    let directly = log.new_lines().0;
    let names = |lines: &[String]| -> Vec<String> {
        lines.iter().map(|line| line.split(' ').next().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&given), [KERNEL, "product", "fill", KERNEL, "product", "fill"]);
    assert_eq!(names(&given), names(&directly));

    // The second time it is recorded, and from then on launched, with the same values and without allocations.
    for round in 2..6 {
        let before = Counting::here();
        bed.step(1).unwrap();
        bed.step(2).unwrap();
        assert!(bed.stream.idle().unwrap());
        assert!(round < 3 || Counting::here() == before, "{} allocations", Counting::here() - before);
        let (work, other) = log.new_lines();
        assert_eq!(work, given);
        assert_eq!(Log::count(&other, "- captured"), usize::from(round == 2), "{other:?}");
        assert_eq!(Log::count(&other, "- launched"), 1, "{other:?}");
    }
    // Other arguments each time, and what is too short: never.
    for (blocks, x) in (10..20).flat_map(|round| [(1, round), (round, 1)]) {
        bed.step(1).unwrap();
        bed.step_of(blocks, x).unwrap();
        bed.stream.synchronize().unwrap();
        bed.step(1).unwrap();
        bed.stream.synchronize().unwrap();
    }
    let (work, other) = log.new_lines();
    assert!(work.len() == 180 && other.is_empty(), "{other:?}");
    // What is long goes without being asked for.
    for _ in 0..22 {
        bed.step(3).unwrap();
    }
    assert_eq!(log.new_lines().0.len(), 64);
    bed.stream.synchronize().unwrap();
    assert_eq!(log.new_lines().0.len(), 2);

    // Memory is freed after the work on it was given, and at once where nothing is kept.
    let mut freed = Bed::new(&gpu, true);
    freed.step(1).unwrap();
    log.new_lines();
    let Bed { mut stream, matrices, addresses } = freed;
    drop((matrices, addresses));
    let (work, other) = log.new_lines();
    assert!(work.is_empty() && other.is_empty(), "{other:?}");
    stream.synchronize().unwrap();
    let (work, other) = log.new_lines();
    assert!(
        work.len() == 3 && other.iter().filter(|line| line.starts_with("- freed")).count() == 4,
        "{other:?}"
    );
    drop(stream.memory(64).unwrap());
    assert_eq!(log.new_lines().1.len(), 1);
    drop(stream);

    // A kernel of a graph is launched by nobody.
    for _ in 0..400 {
        bed.step(5).unwrap();
        bed.step(5).unwrap();
        bed.stream.synchronize().unwrap();
    }
    // The kernel that is refused is named to whoever asks for the list; then all goes on.
    let mut refused = Vec::new();
    for round in 0..400 {
        bed.step(100 + round / 2).unwrap();
        bed.step(100).unwrap();
        refused.extend(bed.stream.synchronize().err().map(|error| error.to_string()));
    }
    assert_eq!(refused.len(), 1, "{refused:?}");
    for words in ["recording a graph, launching reduce of reduce:f32 (GPU 0)", "a fake error"] {
        assert!(refused[0].contains(words), "{refused:?}");
    }
    log.new_lines();
    drop((plain, bed));

    // Every graph was destroyed with its stream.
    let text = std::fs::read_to_string(folder.join("log")).unwrap();
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let count = |word| Log::count(&lines, word);
    assert!(count("- captured") == count("- graph destroyed") && count("- captured") > 2);
    assert!(count("- made ready") == count("- ready one destroyed") && count("- made ready") > 2);
}
