//! Saving Hugging Face directories: nothing half-written is seen or stays, and only models are replaced.

use super::hf::{check_content, names, save, saved, tensors, tiny, values};
use collectives::{DType, digest};
use models::hf::{Checkpoint, Parts, SaveOptions, Writer, check_destination};
use models::{Error, LlamaConfig};
use std::fs;
use std::path::Path;

fn fill(writer: &mut Writer, seed: u64) {
    tensors(&tiny()).iter().for_each(|spec| writer.add(&spec.name, &values(spec, seed)).unwrap());
}

#[test]
fn weights_come_in_order_and_whole() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("m");
    let create = || Writer::create(&dir, &tiny(), DType::F32, &SaveOptions::default()).unwrap();
    let text = create().add("lm_head.weight", &[0.0f32]).unwrap_err().to_string();
    assert!(text.contains("lm_head.weight") && text.contains("model.embed_tokens.weight"), "{text}");
    assert!(create().add("model.embed_tokens.weight", &[0.0f32; 89]).is_err());
    let text = create().finish().unwrap_err().to_string();
    assert!(text.contains("model.embed_tokens.weight is not complete: 0 of 88"), "{text}");
    let mut writer = create();
    fill(&mut writer, 1);
    assert!(writer.add("lm_head.weight", &[0.0f32]).is_err());
    assert!(writer.add_file("../evil", b"").is_err());
    writer.add_file("tokenizer.json", b"{}").unwrap();
    writer.finish().unwrap();
    assert_eq!(names(&dir), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert!(Writer::create(&dir, &tiny(), DType::I32, &SaveOptions::default()).is_err());
    assert_eq!(names(home.path()), ["m"]);
}

/// What is in the header of a safetensors file, which follows its length.
fn header(file: &Path) -> serde_json::Value {
    let bytes = fs::read(file).unwrap();
    let (length, rest) = bytes.split_first_chunk().unwrap();
    serde_json::from_slice(&rest[..u64::from_le_bytes(*length) as usize]).unwrap()
}

/// We read neither: older transformers refuse a file that does not say whose tensors it has, and tools for shards go by the
/// size.
#[test]
fn files_say_what_others_ask_of_them() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("m");
    for (dtype, size) in [(DType::F32, 4), (DType::Bf16, 2)] {
        let options = SaveOptions { file_limit: 1000, ..SaveOptions::default() };
        save(&dir, &tiny(), dtype, &options, 1).unwrap();
        let index = fs::read(dir.join("model.safetensors.index.json")).unwrap();
        let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
        let elements: usize = tensors(&tiny()).iter().map(|spec| spec.len()).sum();
        assert_eq!(index["metadata"], serde_json::json!({"total_size": elements * size}), "{dtype}");
        let shards: Vec<String> = names(&dir).into_iter().filter(|n| n.ends_with(".safetensors")).collect();
        assert!(shards.len() > 1, "{shards:?}");
        for shard in shards {
            assert_eq!(header(&dir.join(shard))["__metadata__"], serde_json::json!({"format": "pt"}));
        }
        save(&dir, &tiny(), dtype, &SaveOptions::default(), 1).unwrap();
        let single = header(&dir.join("model.safetensors"));
        assert_eq!(single["__metadata__"], serde_json::json!({"format": "pt"}), "{dtype}");
    }
}

#[test]
fn what_transformers_would_not_load_is_not_begun() {
    let home = tempfile::tempdir().unwrap();
    let odd = LlamaConfig { heads: 3, ..tiny() };
    odd.validate().unwrap();
    let Err(e) = Writer::create(home.path().join("m"), &odd, DType::F32, &SaveOptions::default()) else {
        panic!("begun")
    };
    assert!(e.to_string().contains("hidden size 8 is no multiple of the 3 heads"), "{e}");
    assert!(names(home.path()).is_empty());
    // Who reads it here takes the shape.
    let parts = Parts::plan(&home.path().join("m"), &odd, &SaveOptions::default()).unwrap();
    parts.begin(&[]).unwrap();
    let mut part = parts.part();
    tensors(&odd).iter().for_each(|t| part.write(&t.name, 0..t.len(), &values(t, 1)).unwrap());
    part.finish().unwrap();
    assert_eq!(*Checkpoint::open(home.path().join("m")).unwrap().config(), odd);
}

#[test]
fn what_transformers_writes_beside_a_model_is_replaced_and_carried() {
    let (_home, dir) = saved(&tiny());
    let templates = ["additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja"];
    fs::create_dir(dir.join("additional_chat_templates")).unwrap();
    let beside = ["added_tokens.json", "chat_template.jinja", "generation_config.json", "tokenizer.model"];
    beside.iter().chain(&templates).for_each(|name| fs::write(dir.join(name), name).unwrap());
    let companions = Checkpoint::open(&dir).unwrap().companions().unwrap();
    let all = beside.iter().chain(&templates);
    assert_eq!(companions, all.map(|name| (name.to_string(), name.as_bytes().to_vec())).collect::<Vec<_>>());
    let mut writer = Writer::create(&dir, &tiny(), DType::F32, &SaveOptions::default()).unwrap();
    fill(&mut writer, 2);
    assert!(writer.add_file("additional_chat_templates/../evil.jinja", b"").is_err());
    let kept = companions[..3].iter().chain(&companions[4..]);
    kept.for_each(|(name, content)| writer.add_file(name, content).unwrap());
    writer.finish().unwrap();
    let all = ["added_tokens.json", "additional_chat_templates", "chat_template.jinja", "config.json"];
    assert_eq!(names(&dir), [&all[..], &["generation_config.json", "model.safetensors"]].concat());
    assert_eq!(names(&dir.join("additional_chat_templates")), ["rag.jinja", "tool_use.jinja"]);
    fs::write(dir.join("additional_chat_templates/notes.txt"), "mine").unwrap();
    let text = check_destination(&dir, 0).unwrap_err().to_string();
    assert!(text.contains("has additional_chat_templates/notes.txt, which is no part of a model"), "{text}");
    check_content(&dir, &tiny(), 2, |x| x);
}

#[test]
fn a_failed_save_leaves_no_parents_that_it_made() {
    let home = tempfile::tempdir().unwrap();
    let create =
        || Writer::create(home.path().join("a/b/m"), &tiny(), DType::F32, &SaveOptions::default()).unwrap();
    create().finish().unwrap_err();
    assert!(names(home.path()).is_empty());
    let writer = create();
    fs::write(home.path().join("a/notes"), "somebody's").unwrap();
    drop(writer);
    assert_eq!(names(&home.path().join("a")), ["notes"]);
}

#[test]
fn an_abandoned_save_leaves_the_old_model() {
    let (home, dir) = saved(&tiny());
    let mut writer = Writer::create(&dir, &tiny(), DType::F32, &SaveOptions::default()).unwrap();
    writer.add("model.embed_tokens.weight", &[0.0f32; 88]).unwrap();
    assert!(names(home.path()).len() <= 2, "at most a temporary directory lies beside");
    drop(writer);
    assert_eq!(names(home.path()), ["model"]);
    check_content(&dir, &tiny(), 1, |x| x);
}

#[test]
fn what_a_killed_save_left_goes_and_a_living_one_stays() {
    let (home, dir) = saved(&tiny());
    let host = digest(rustix::system::uname().nodename().to_bytes().iter().copied());
    let unfinished = |process: u32| home.path().join(format!("model.tmp-{host:016x}-{process}-0"));
    let living = unfinished(2);
    std::fs::create_dir(&living).unwrap();
    let lock = std::fs::File::open(living).unwrap();
    lock.lock().unwrap();
    let kept = names(home.path());
    let stale = unfinished(1);
    std::fs::create_dir(&stale).unwrap();
    std::fs::write(stale.join("model.safetensors"), b"half").unwrap();
    // Another model's, and a user's own.
    let others = ["model.tmp-1", "model.tmp-1-0", "model.tmp-1-0-old", "model.tmp-old", "model2.tmp-1-0"];
    others.iter().for_each(|name| std::fs::create_dir(home.path().join(name)).unwrap());
    models::remove_unfinished(&dir);
    let mut expected: Vec<String> = kept.into_iter().chain(others.map(Into::into)).collect();
    expected.sort();
    assert_eq!(names(home.path()), expected);
    // Its process has ended: the next save takes it away.
    drop(lock);
    drop(Writer::create(&dir, &tiny(), DType::F32, &SaveOptions::default()).unwrap());
    assert_eq!(names(home.path()), [&["model"][..], &others].concat());
}

#[test]
fn only_model_directories_are_replaced() {
    let (home, dir) = saved(&tiny());
    let refusal = |path: &Path| {
        let by_check = check_destination(path, 0).unwrap_err().to_string();
        let by_save = save(path, &tiny(), DType::F32, &SaveOptions::default(), 2).unwrap_err().to_string();
        assert_eq!(by_check, by_save);
        by_check
    };
    fs::write(dir.join("thesis.tex"), "years of work").unwrap();
    assert!(refusal(&dir).contains("has thesis.tex, which is no part of a model"));
    assert!(refusal(&dir.join("thesis.tex")).contains("not a directory"));
    assert!(refusal(&dir.join("thesis.tex/model")).contains("Not a directory"));
    assert!(refusal(Path::new("/")).contains("name of its own"));
    assert!(refusal(Path::new("/proc")).contains("a file system is mounted there"));
    assert!(refusal(&dir.with_file_name("x".repeat(240))).contains("240 bytes: 220 are possible"));
    assert_eq!(fs::read_to_string(dir.join("thesis.tex")).unwrap(), "years of work");
    fs::remove_file(dir.join("thesis.tex")).unwrap();

    // Something else appeared while the model was being written.
    let mut writer = Writer::create(&dir, &tiny(), DType::F32, &SaveOptions::default()).unwrap();
    fill(&mut writer, 2);
    fs::write(dir.join("notes.txt"), "x").unwrap();
    let text = writer.finish().unwrap_err().to_string();
    assert!(text.contains("the finished model was left here") && text.contains("has notes.txt"), "{text}");
    check_content(&dir, &tiny(), 1, |x| x);
    let left = home.path().join(format!("model.new-{}-0", std::process::id()));
    check_content(&left, &tiny(), 2, |x| x);
    fs::remove_dir_all(left).unwrap();

    // An empty directory, a missing parent and a link to a model directory are fine.
    let empty = home.path().join("empty");
    fs::create_dir(&empty).unwrap();
    save(&empty, &tiny(), DType::F32, &SaveOptions::default(), 3).unwrap();
    check_content(&empty, &tiny(), 3, |x| x);
    // With a slash at its end, as shells complete it.
    save(&home.path().join("a/b/c/"), &tiny(), DType::F32, &SaveOptions::default(), 4).unwrap();
    check_content(&home.path().join("a/b/c"), &tiny(), 4, |x| x);
    assert_eq!(names(&home.path().join("a/b")), ["c"]);
    let link = home.path().join("link");
    std::os::unix::fs::symlink(&empty, &link).unwrap();
    save(&link, &tiny(), DType::F32, &SaveOptions::default(), 5).unwrap();
    check_content(&empty, &tiny(), 5, |x| x);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(names(home.path()), ["a", "empty", "link", "model"]);
}

#[test]
fn a_destination_that_is_not_there_yet_has_one_name() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path().canonicalize().unwrap();
    fs::create_dir(home.join("runs")).unwrap();
    for (link, to) in [("link", "runs"), ("dangling", "nothing")] {
        std::os::unix::fs::symlink(to, home.join(link)).unwrap();
    }
    let ways =
        [("link/a/b", "runs/a/b"), ("runs/../out", "out"), ("link/../out/", "out"), ("link/./a", "runs/a")];
    for (way, place) in ways {
        assert_eq!(check_destination(&home.join(way), 0).unwrap(), home.join(place), "{way}");
    }
    let refusals = [
        ("new/../out", "leads back out of a directory that is not there"),
        ("new/..", "leads back out"),
        ("dangling/", "dangling: a link to nothing"),
        ("dangling/out", "dangling: a link to nothing"),
    ];
    for (way, words) in refusals {
        let Err(error) = Writer::create(home.join(way), &tiny(), DType::F32, &SaveOptions::default()) else {
            panic!("{way}")
        };
        assert!(error.to_string().contains(words), "{error}");
    }
    assert_eq!(names(&home), ["dangling", "link", "runs"]);
}

#[test]
fn too_large_a_model_is_refused_before_writing() {
    let home = tempfile::tempdir().unwrap();
    let huge = LlamaConfig { layers: 1 << 14, ..LlamaConfig::preset("llama-3.1-405b").unwrap() };
    let dir = home.path().join("m");
    let Err(error) = Writer::create(&dir, &huge, DType::F32, &SaveOptions::default()) else {
        panic!("a disk with room for {} bytes", huge.parameters() * 4)
    };
    assert!(matches!(&error, Error::Format { problem, .. } if problem.contains("its disk has")), "{error}");
    assert_eq!(names(home.path()).len(), 0);
}

/// A disk that fills while the model is being written, in a private mount of 256 KiB.
#[test]
fn a_full_disk_leaves_nothing() {
    const DIR: &str = "MODELS_TEST_SMALL_DISK";
    if let Ok(disk) = std::env::var(DIR) {
        let disk = Path::new(&disk);
        let mut writer =
            Writer::create(disk.join("m"), &tiny(), DType::F32, &SaveOptions::default()).unwrap();
        // Somebody else fills it after the check.
        fs::write(disk.join("other"), vec![1; 254 << 10]).unwrap();
        let first = &tensors(&tiny())[0];
        let failure = tensors(&tiny()).iter().find_map(|s| writer.add(&s.name, &values(s, 1)).err());
        let text = match failure {
            Some(error) => error.to_string(),
            None => writer.finish().unwrap_err().to_string(),
        };
        assert!(text.contains("No space left") && text.contains("bytes"), "{text} ({})", first.name);
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let script = format!(
        "mount -t tmpfs -o size=256k none '{0}' || exit 77; {DIR}='{0}' '{1}' --exact hf_save::a_full_disk_leaves_nothing || \
         exit 1; test \"$(ls -A '{0}')\" = other",
        home.path().display(),
        std::env::current_exe().unwrap().display(),
    );
    match std::process::Command::new("unshare").args(["-rm", "sh", "-c", &script]).output() {
        Ok(out) if out.status.success() => {}
        Ok(out) if out.status.code() == Some(77) || out.stderr.starts_with(b"unshare") => {
            harness::skip(&format!("no private mount here: {}", String::from_utf8_lossy(&out.stderr).trim()));
        }
        Ok(out) => panic!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr)),
        Err(e) => harness::skip(&format!("no unshare command here: {e}")),
    }
}
