//! NCCL's and the driver's calls as we make them, on a driver and an NCCL that run on the processor: which arguments, in
//! which order, on whose stream. What kernels compute is shown elsewhere, on emulated devices.

use collectives::bootstrap::{Identity, shm_group};
use collectives::device::cuda::{Event, Gpu, Nccl, Stream, Survey, Urgency};
use collectives::device::{Module, Queue, SharedQueue};
use collectives::{Buffer, Communicator, DType, Options, Order, ReduceOp, Staged, Wired};
use conformance::{device, standard};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// What is skipped where the libraries cannot be built or found.
const ABOUT: &str = "calls of CUDA and NCCL";

/// Builds the two libraries and lets ours be found; false where there is no C compiler.
///
/// Everything runs in one process, whose environment is changed once, before any library is opened.
fn fake() -> bool {
    static BUILT: OnceLock<bool> = OnceLock::new();
    *BUILT.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fake_driver_and_nccl");
        let Some(folder) = harness::fake_cuda(ABOUT, folder, &["driver", "nccl"]) else { return false };
        // SAFETY: every test comes here first, and only one of them gets to this line.
        unsafe { std::env::set_var("CARAVAN_CUDA_LIBRARIES", &folder) };
        let survey = Survey::take();
        for found in [&survey.driver, &survey.nccl] {
            let file = &found.as_ref().expect("it was just built").file;
            if !Path::new(file).starts_with(&folder) {
                harness::skip_all(ABOUT, &format!("the loader finds the real {file} first"));
                return false;
            }
        }
        true
    })
}

/// Runs `body` as every rank, each with a GPU, a compute stream and a group of ranks.
fn ranks(n: usize, options: Options, body: impl Fn(Communicator, Gpu, SharedQueue<Stream>) + Sync) {
    Communicator::on_threads(n, options, |comm| {
        let gpu = Gpu::open(comm.rank()).expect("a GPU");
        let queue = SharedQueue::new(Stream::new(&gpu, Urgency::Normal).expect("a stream"));
        body(comm, gpu, queue);
    });
}

fn connected(comm: Communicator, gpu: &Gpu, queue: &SharedQueue<Stream>, order: Order) -> Communicator {
    let wire = Nccl::connect(&comm, gpu, Duration::from_secs(20)).expect("NCCL");
    let carrier = Wired::new(&comm, queue.clone(), wire, order).expect("a carrier");
    comm.with_carrier(Arc::new(carrier))
}

fn upload(comm: &Communicator, queue: &SharedQueue<Stream>, content: &[i32]) -> Buffer<i32> {
    let mut buffer = comm.alloc::<i32>(content.len()).expect("memory");
    let bytes: Vec<u8> = content.iter().flat_map(|x| x.to_ne_bytes()).collect();
    // SAFETY: the buffer is as long, and freed after the stream is done.
    unsafe { queue.clone().upload(&bytes, buffer.view_mut().as_mut_ptr() as u64).expect("copies") };
    buffer
}

fn found(queue: &SharedQueue<Stream>, buffer: &Buffer<i32>) -> Vec<i32> {
    let mut bytes = vec![0u8; 4 * buffer.len()];
    // SAFETY: both are that long.
    unsafe { queue.clone().download(buffer.view().as_ptr() as u64, &mut bytes).expect("copies") };
    bytes.chunks(4).map(|x| i32::from_ne_bytes(x.try_into().unwrap())).collect()
}

fn mine(rank: usize, len: usize) -> Vec<i32> {
    (0..len).map(|i| (rank * 1000 + i) as i32).collect()
}

#[test]
fn every_call_has_its_arguments_in_place() {
    if !fake() {
        return;
    }
    for n in 1..=4 {
        ranks(n, standard(), |comm, gpu, queue| {
            let comm = connected(comm, &gpu, &queue, Order::Native);
            assert!(comm.carrier().unwrap().name().starts_with("nccl 2.30"));
            let (rank, all) = (comm.rank(), |len| (0..n).map(move |r| mine(r, len)));
            let up = |content: &[i32]| upload(&comm, &queue, content);
            let blank = |len: usize| up(&vec![0; len]);
            let sum = |len: usize| (0..len).map(|i| all(len).map(|x| x[i]).sum()).collect::<Vec<i32>>();
            for round in 0..3 {
                let root = round % n;
                let given = up(&mine(rank, 6));
                let (_, got) = comm.start_all_reduce(given, blank(6), ReduceOp::Sum).unwrap().wait().unwrap();
                assert_eq!(found(&queue, &got), sum(6));
                let got = comm.start_all_reduce_in_place(up(&mine(rank, 6)), ReduceOp::Max).unwrap();
                assert_eq!(found(&queue, &got.wait().unwrap()), mine(n - 1, 6));

                let own = 3 * rank..3 * (rank + 1);
                let given = up(&mine(rank, 3 * n));
                let (given, got) =
                    comm.start_reduce_scatter(given, blank(3), ReduceOp::Sum).unwrap().wait().unwrap();
                assert_eq!(found(&queue, &got), sum(3 * n)[own.clone()]);
                let got = comm.start_reduce_scatter_in_place(given, ReduceOp::Sum).unwrap().wait().unwrap();
                assert_eq!(found(&queue, &got)[own.clone()], sum(3 * n)[own.clone()]);

                let whole: Vec<i32> = all(3).flatten().collect();
                let (_, got) =
                    comm.start_all_gather(up(&mine(rank, 3)), blank(3 * n)).unwrap().wait().unwrap();
                assert_eq!(found(&queue, &got), whole);
                let mut placed = vec![0; 3 * n];
                placed[own].copy_from_slice(&mine(rank, 3));
                let got = comm.start_all_gather_in_place(up(&placed)).unwrap().wait().unwrap();
                assert_eq!(found(&queue, &got), whole);

                let got = comm.start_broadcast(up(&mine(rank, 5)), root).unwrap().wait().unwrap();
                assert_eq!(found(&queue, &got), mine(root, 5));
                let got = comm.start_reduce_in_place(up(&mine(rank, 5)), ReduceOp::Sum, root).unwrap();
                let expected = if rank == root { sum(5) } else { mine(rank, 5) };
                assert_eq!(found(&queue, &got.wait().unwrap()), expected);

                let started = comm.start_all_to_all(up(&mine(rank, 2 * n)), blank(2 * n)).unwrap();
                let expected: Vec<i32> =
                    all(2 * n).flat_map(|x| x[2 * rank..2 * rank + 2].to_vec()).collect();
                assert_eq!(found(&queue, &started.wait().unwrap().1), expected);

                let mut got = blank(3 * n);
                comm.gather(&up(&mine(rank, 3)), (rank == root).then(|| got.view_mut()), root).unwrap();
                assert_eq!(found(&queue, &got), if rank == root { whole.clone() } else { vec![0; 3 * n] });
                let (given, mut got) = (up(&whole), blank(3));
                comm.scatter((rank == root).then(|| given.view()), &mut got, root).unwrap();
                assert_eq!(found(&queue, &got), mine(rank, 3));

                if n > 1 {
                    let (next, last) = ((rank + 1) % n, (rank + n - 1) % n);
                    let sent = comm.start_send(up(&mine(rank, 7)), next, 1).unwrap();
                    let got = comm.start_recv(blank(7), last, 1).unwrap();
                    assert_eq!(found(&queue, &got.wait().unwrap()), mine(last, 7));
                    drop(sent);
                }
            }
            let group = comm.split(Some(rank as u32 % 2), -(rank as i64)).unwrap().unwrap();
            let members: Vec<usize> = (0..n).rev().filter(|r| r % 2 == rank % 2).collect();
            let started = group.start_all_gather(up(&mine(rank, 2)), blank(2 * group.size())).unwrap().wait();
            let expected: Vec<i32> = members.iter().flat_map(|&r| mine(r, 2)).collect();
            assert_eq!(found(&queue, &started.unwrap().1), expected);
        });
    }
}

#[test]
fn wide_sums_of_the_library_and_kernels_that_are_missing_are_errors() {
    if !fake() {
        return;
    }
    ranks(2, standard(), |comm, gpu, queue| {
        let comm = connected(comm, &gpu, &queue, Order::Native);
        let buffer = |len| comm.alloc::<half::bf16>(len).unwrap();
        let error = comm
            .start_reduce_scatter_acc(buffer(8), comm.alloc::<f32>(4).unwrap(), ReduceOp::Sum)
            .map(drop)
            .unwrap_err()
            .to_string();
        assert!(error.contains("bf16") && error.contains("canonical"), "{error}");
        drop(comm.start_all_gather_in_place(buffer(8)).unwrap());
    });
    ranks(2, standard(), |comm, gpu, queue| {
        let wire = Nccl::connect(&comm, &gpu, Duration::from_secs(20)).expect("NCCL");
        // The peer may have come to its sum, and failed there, before this rank has its carrier.
        let carrier = Wired::new(&comm, queue.clone(), wire, Order::Canonical);
        let summed = carrier.and_then(|carrier| {
            let comm = comm.with_carrier(Arc::new(carrier));
            comm.start_all_reduce_in_place(comm.alloc::<f32>(8)?, ReduceOp::Sum)?.wait().map(drop)
        });
        let error = summed.unwrap_err().to_string();
        // The compiler of kernels may be missing, or what it made cannot be loaded here; the peer tells the same.
        assert!(error.contains("fake driver") || error.contains("NVRTC"), "{error}");
    });
}

/// A thread that has given the driver nothing yet has no context.
#[test]
fn any_thread_may_ask_and_drop_what_another_has_made() {
    if !fake() {
        return;
    }
    let gpu = Gpu::open(0).expect("a GPU");
    let mut stream = Stream::new(&gpu, Urgency::High).expect("a stream");
    let [start, end] = [0, 1].map(|_| {
        let event = Event::timed(&gpu).expect("an event");
        stream.record(&event).expect("an event happens");
        event
    });
    let elsewhere = |work: Box<dyn FnOnce() + Send>| std::thread::spawn(work).join().expect("no panic");
    let [start, end] = [start, end].map(Arc::new);
    let (a, b) = (Arc::clone(&start), Arc::clone(&end));
    elsewhere(Box::new(move || assert!(b.seconds_since(&a).unwrap() >= 0.0)));
    let event = Arc::clone(&start);
    elsewhere(Box::new(move || event.wait().unwrap()));
    let stream = Arc::new(std::sync::Mutex::new(stream));
    let asked = Arc::clone(&stream);
    elsewhere(Box::new(move || assert!(asked.lock().unwrap().idle().unwrap())));
    elsewhere(Box::new(move || drop(Arc::into_inner(start))));
    elsewhere(Box::new(move || drop(Arc::into_inner(end))));
    elsewhere(Box::new(move || drop(Arc::into_inner(stream))));
    elsewhere(Box::new(move || drop(gpu)));
}

/// The host runs ahead of a GPU by as much staging memory as there may be: then it waits for the oldest upload, not for one
/// that it has just given.
#[test]
fn uploads_wait_for_the_oldest_that_is_under_way() {
    if !fake() {
        return;
    }
    let gpu = Gpu::open(0).expect("a GPU");
    let mut stream = Stream::new(&gpu, Urgency::Low).expect("a stream");
    let driver = Survey::take().driver.expect("it was found").file;
    // SAFETY: the library is loaded already; a function without arguments.
    let behind = || unsafe {
        let library = libloading::Library::new(&driver).expect("the driver");
        library.get::<unsafe extern "C" fn() -> i64>(b"fake_late_events").expect("a function")()
    };
    assert_eq!(behind(), -1);
    let mut target = stream.memory(256).expect("memory");
    let to = target.as_mut_ptr() as u64;
    for upload in 0..200usize {
        // SAFETY: inside the target.
        unsafe { stream.upload(&vec![upload as u8; 1 + upload % 7 * 40], to).expect("an upload") };
        assert!(behind() < 0 || behind() >= 63, "upload {upload} waited for one with {} after it", behind());
    }
    assert!(behind() >= 63);
}

#[test]
fn two_ranks_on_one_gpu_need_permission() {
    if !fake() {
        return;
    }
    Communicator::on_threads(2, standard(), |comm| {
        let gpu = Gpu::open(3).expect("a GPU");
        let error = Nccl::connect(&comm, &gpu, Duration::from_secs(20)).err().unwrap().to_string();
        assert!(error.contains("ranks 0 and 1 have the same GPU"), "{error}");
        assert!(error.contains("NCCL_MULTI_RANK_GPU_ENABLE=1"), "{error}");
    });
}

#[test]
fn modules_whose_launches_no_block_could_hold_are_refused_beforehand() {
    if !fake() {
        return;
    }
    let gpu = Gpu::open(0).expect("a GPU");
    let mut stream = Stream::new(&gpu, Urgency::Normal).expect("a stream");
    let module = Module::reduce(DType::F32).shared(gpu.properties().shared + 1);
    let error = stream.prepare(&[module]).unwrap_err().to_string();
    for word in ["preparing reduce:f32", "232449 bytes of shared memory a block", "has 232448"] {
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn a_rank_that_gives_up_ends_the_others() {
    if !fake() {
        return;
    }
    let options = Options { deadline: Duration::from_secs(5), ..standard() };
    ranks(3, options, |comm, gpu, queue| {
        let comm = connected(comm, &gpu, &queue, Order::Native);
        if comm.rank() == 2 {
            std::thread::sleep(Duration::from_millis(100));
            return comm.abort("the disk is full");
        }
        let buffer = || comm.alloc::<i32>(6).unwrap();
        let started = comm.start_all_reduce_in_place(buffer(), ReduceOp::Sum);
        let error = started.and_then(|started| started.wait().map(drop)).unwrap_err().to_string();
        assert!(error.contains("the disk is full"), "{error}");
        let again = comm.start_all_gather_in_place(buffer()).map(drop).unwrap_err().to_string();
        assert_eq!(again, error);
    });
}

/// NCCL connects ranks at their first collective, and does not say that the call is in its stream before all have come to it:
/// the host of a rank that has come waits there.
#[test]
fn a_rank_that_does_not_come_to_a_first_collective_is_named() {
    if !fake() {
        return;
    }
    let library = Survey::take().nccl.expect("it was found").file;
    let connect_late = || {
        // SAFETY: the library is loaded already; a function without arguments.
        unsafe {
            let library = libloading::Library::new(&library).expect("NCCL");
            library.get::<unsafe extern "C" fn()>(b"fake_connect_late").expect("a function")();
        }
    };
    const STALLED: usize = 1;
    let gather = |comm: Communicator, gpu: &Gpu, queue: &SharedQueue<Stream>, late: &dyn Fn()| {
        connect_late();
        let rank = comm.rank();
        let comm = connected(comm, gpu, queue, Order::Native);
        let (given, blank) = (upload(&comm, queue, &mine(rank, 3)), upload(&comm, queue, &[0; 9]));
        if rank == STALLED {
            late();
        }
        let (_, got) = comm.start_all_gather(given, blank)?.wait()?;
        collectives::Result::Ok(found(queue, &got))
    };
    let whole: Vec<i32> = (0..3).flat_map(|rank| mine(rank, 3)).collect();
    let no_deadline = Options { deadline: Duration::MAX, ..standard() };
    ranks(3, no_deadline, |comm, gpu, queue| {
        let late = || std::thread::sleep(Duration::from_millis(100));
        assert_eq!(gather(comm, &gpu, &queue, &late).expect("all came"), whole);
    });
    let options = Options { deadline: Duration::from_secs(1), ..standard() };
    // The other two have given up before the one that stalls goes on.
    let given_up = AtomicUsize::new(0);
    ranks(3, options, |comm, gpu, queue| {
        let rank = comm.rank();
        let late = || {
            let until = Instant::now() + Duration::from_secs(60);
            while given_up.load(Ordering::Acquire) < 2 && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        let gathered = gather(comm, &gpu, &queue, &late);
        given_up.fetch_add(1, Ordering::Release);
        let error = gathered.unwrap_err().to_string();
        for word in ["all_gather", "between devices", "no answer from rank 1 within 1s"] {
            assert!(error.contains(word), "rank {rank}: {error}");
        }
    });
}

/// NCCL frees what a rank of a host has only once the others have come to their end: a rank that leaves alone, as one does
/// that fails, is through with it all the same.
#[test]
fn a_rank_that_leaves_waits_for_no_other() {
    if !fake() {
        return;
    }
    ranks(2, standard(), |comm, gpu, queue| {
        let carried = connected(comm.clone(), &gpu, &queue, Order::Native);
        if comm.rank() == 1 {
            // What the other rank says once it has left.
            comm.recv(&mut [0u8][..], 0, 1).expect("it gets there");
            return;
        }
        drop(carried);
        comm.send(&[1u8][..], 1, 1).expect("the other is still there");
    });
}

/// The driver's calls of the carrier through the host: over messages, with page-locked memory of the driver, and over
/// shared memory, which is page-locked where it lies.
#[test]
fn calls_through_the_host_have_their_arguments_in_place() {
    if !fake() {
        return;
    }
    let staged = |comm: Communicator, queue: SharedQueue<Stream>| {
        let carrier = Staged::new(&comm, queue.clone()).expect("a carrier");
        device(&comm.with_carrier(Arc::new(carrier)), &queue);
    };
    for n in 1..=3 {
        ranks(n, standard(), |comm, _, queue| staged(comm, queue));
    }
    let job = format!("caravan-test-staged-{}", std::process::id());
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (identity, staged) = (Identity::on_this_host(rank, 2, &job), &staged);
            scope.spawn(move || {
                let transport = shm_group(&identity, &Default::default()).expect("shared memory");
                let comm = Communicator::new(transport, standard()).expect("a rank");
                let gpu = Gpu::open(rank).expect("a GPU");
                staged(comm, SharedQueue::new(Stream::new(&gpu, Urgency::Normal).expect("a stream")));
            });
        }
    });
}
