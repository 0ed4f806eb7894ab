//! Products with cuBLASLt. Descriptions and the heuristic's choice are kept for each shape: its first answer, so that a
//! product has the same bits in every run; measurements may take another.

use super::gpu::Gpu;
use crate::buffer::{Buffer, Memory};
use crate::device::compile::missing;
use crate::device::product::{MatmulPrecision, PRODUCT_WORKSPACE, Product};
use crate::element::DType;
use crate::error::{Error, Result};
use cuda_sys::cublaslt::{self, Algorithm, Choice, CublasLt, Status};
use cuda_sys::driver::Handle;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// Answers of the heuristic that a measurement compares.
const WAYS: usize = 8;

/// The library's status for what it cannot compute.
const NOT_SUPPORTED: Status = 15;

/// Everything that a choice depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    m: usize,
    n: usize,
    k: usize,
    inputs: DType,
    output: DType,
    left_transposed: bool,
    right_transposed: bool,
    added: Added,
    precision: MatmulPrecision,
    /// Bytes to which left, right, added and out are aligned, at most 16, which is as much as one instruction moves: the
    /// same product must have the same bits wherever its matrices lie.
    alignment: [u32; 4],
    /// Which of the heuristic's answers is taken.
    way: usize,
}

/// What a product adds.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Added {
    Nothing,
    /// What the result holds.
    Own,
    /// Another matrix: not every algorithm takes one.
    Other,
}

impl Key {
    fn of(p: &Product<'_>) -> Self {
        let alignment = |address: u64| 1 << address.trailing_zeros().min(4);
        Key {
            m: p.m,
            n: p.n,
            k: p.k,
            inputs: p.inputs,
            output: p.output,
            left_transposed: p.left.1,
            right_transposed: p.right.1,
            added: match p.added {
                None => Added::Nothing,
                Some(at) if at == p.out => Added::Own,
                Some(_) => Added::Other,
            },
            precision: p.precision,
            alignment: [p.left.0, p.right.0, p.added.unwrap_or(p.out), p.out].map(alignment),
            way: p.way,
        }
    }
}

/// What is kept for a shape.
struct Prepared {
    described: Described,
    algorithm: Algorithm,
}

/// A shape in the library's words.
struct Described {
    key: Key,
    product: Object,
    /// Of the library's left (our right), right (our left), and result.
    layouts: [Object; 3],
    /// Of another matrix that is added. The library takes one description of both for one matrix.
    other: Option<Object>,
}

/// A description of the library, destroyed when dropped.
struct Object {
    handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> Status,
    _library: Arc<CublasLt>,
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: created by this library, used no more.
        unsafe { (self.destroy)(self.handle) };
    }
}

/// One product, as a value: which of the shapes, and where its matrices and what it works in lie.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Call {
    prepared: usize,
    left: u64,
    right: u64,
    added: u64,
    out: u64,
    workspace: u64,
}

/// The products of one stream.
pub(super) struct Products {
    prepared: Vec<Prepared>,
    known: HashMap<Key, usize>,
    handle: Object,
    library: Arc<CublasLt>,
    /// Taken when first needed, unless some was lent before.
    workspace: Option<Buffer<u8>>,
    gpu: Gpu,
}

impl Products {
    pub(super) fn open(gpu: &Gpu) -> Result<Self> {
        let library = Arc::new(CublasLt::load(gpu.newest_cuda().0).map_err(missing)?);
        gpu.enter()?;
        let create = library.create;
        // SAFETY: a valid place to write to, in the GPU's context.
        let handle = object(&library, "cublasLtCreate", library.destroy, |out| unsafe { create(out) })?;
        Ok(Products {
            prepared: Vec::new(),
            known: HashMap::new(),
            handle,
            library,
            workspace: None,
            gpu: gpu.clone(),
        })
    }

    /// `workspace` is the GPU's, of [`PRODUCT_WORKSPACE`] bytes or more.
    pub(super) fn lend(&mut self, workspace: Memory) {
        self.workspace = Some(Buffer::from_memory(workspace));
    }

    /// A product with everything that it needs: nothing has to be taken or chosen when it runs. `None` is one that has no
    /// result.
    pub(super) fn ready(&mut self, p: &Product<'_>) -> Result<Option<Call>> {
        if p.m == 0 || p.n == 0 {
            return Ok(None);
        }
        if self.workspace.is_none() {
            self.lend(self.gpu.memory(PRODUCT_WORKSPACE)?);
        }
        let workspace = self.workspace.as_ref().map_or(0, |buffer| buffer.view().as_ptr() as u64);
        let key = Key::of(p);
        let prepared = match self.known.get(&key) {
            Some(&known) => known,
            None => {
                self.prepared.push(self.prepare(&key)?);
                self.known.insert(key, self.prepared.len() - 1);
                self.prepared.len() - 1
            }
        };
        let added = p.added.unwrap_or(p.out);
        Ok(Some(Call { prepared, left: p.left.0, right: p.right.0, added, out: p.out, workspace }))
    }

    /// Gives a stream a product that was made ready here.
    pub(super) fn run(&self, call: &Call, stream: Handle) -> Result<()> {
        let Prepared { described, algorithm } = &self.prepared[call.prepared];
        let (one, zero) = (1f32, 0f32);
        let beta = if described.key.added == Added::Nothing { &zero } else { &one };
        let [left, right, out] = &described.layouts;
        let added = described.other.as_ref().unwrap_or(out);
        // SAFETY: whoever gave the product promised its matrices until the stream has used them; they are as long as the
        // description says, as `Product` has checked, and so is the workspace, which stays as long as the stream. Scales
        // are read before the call returns. Our row-major result is the library's column-major transpose, so that its left
        // matrix is our right one.
        let status = unsafe {
            (self.library.product)(
                self.handle.handle,
                described.product.handle,
                std::ptr::from_ref(&one).cast(),
                call.right as *const c_void,
                left.handle,
                call.left as *const c_void,
                right.handle,
                std::ptr::from_ref(beta).cast(),
                call.added as *const c_void,
                added.handle,
                call.out as *mut c_void,
                out.handle,
                algorithm,
                call.workspace as *mut c_void,
                PRODUCT_WORKSPACE,
                stream,
            )
        };
        self.check("cublasLtMatmul", &described.key, status)
    }

    /// How many answers the heuristic has for a product, of those that a measurement compares.
    pub(super) fn ways(&self, p: &Product<'_>) -> Result<usize> {
        Ok(self.answers(&self.describe(&Key::of(p))?, WAYS)?.len())
    }

    fn prepare(&self, key: &Key) -> Result<Prepared> {
        let described = self.describe(key)?;
        match self.answers(&described, key.way + 1)?.get(key.way) {
            Some(&algorithm) => Ok(Prepared { described, algorithm }),
            None => Err(self.refusal("cublasLtMatmulAlgoGetHeuristic", key, NOT_SUPPORTED)),
        }
    }

    fn describe(&self, key: &Key) -> Result<Described> {
        let lib = &self.library;
        let (input, output) = (data_type(key.inputs)?, data_type(key.output)?);
        let create = lib.product_create;
        let compute = match (key.inputs, key.precision) {
            (DType::F32, MatmulPrecision::High) => cublaslt::COMPUTE_TF32,
            _ => cublaslt::COMPUTE_F32,
        };
        // SAFETY: valid places to write to.
        let product = object(lib, "cublasLtMatmulDescCreate", lib.product_destroy, |out| unsafe {
            create(out, compute, cublaslt::TYPE_F32)
        })?;
        let operation = |transposed| match transposed {
            true => cublaslt::OPERATION_TRANSPOSE,
            false => cublaslt::OPERATION_NONE,
        };
        let set = |attribute: c_int, value: i32| {
            // SAFETY: a live description, and a value of the attribute's size.
            let status = unsafe {
                (lib.product_set)(
                    product.handle,
                    attribute,
                    std::ptr::from_ref(&value).cast(),
                    size_of::<i32>(),
                )
            };
            self.check("cublasLtMatmulDescSetAttribute", key, status)
        };
        set(cublaslt::PRODUCT_LEFT, operation(key.right_transposed))?;
        set(cublaslt::PRODUCT_RIGHT, operation(key.left_transposed))?;
        let create = lib.layout_create;
        // A row-major matrix (rows, columns) in memory is the library's (columns, rows).
        let layout = |kind: c_int, rows: usize, columns: usize| {
            // SAFETY: a valid place to write to.
            object(lib, "cublasLtMatrixLayoutCreate", lib.layout_destroy, |out| unsafe {
                create(out, kind, columns as u64, rows as u64, columns as i64)
            })
        };
        let Key { m, n, k, .. } = *key;
        let right = if key.right_transposed { layout(input, n, k)? } else { layout(input, k, n)? };
        let left = if key.left_transposed { layout(input, k, m)? } else { layout(input, m, k)? };
        let out = layout(output, m, n)?;
        let other = (key.added == Added::Other).then(|| layout(output, m, n)).transpose()?;
        Ok(Described { key: *key, product, layouts: [right, left, out], other })
    }

    /// The heuristic's answers, the best first and at most `most`.
    fn answers(&self, described: &Described, most: usize) -> Result<Vec<Algorithm>> {
        let (lib, Described { key, product, layouts, other }) = (&self.library, described);
        let create = lib.preference_create;
        // SAFETY: a valid place to write to.
        let preference =
            object(lib, "cublasLtMatmulPreferenceCreate", lib.preference_destroy, |out| unsafe {
                create(out)
            })?;
        let prefer = |attribute: c_int, value: *const c_void, bytes: usize| {
            // SAFETY: a live description, and a value of the attribute's size.
            let status = unsafe { (lib.preference_set)(preference.handle, attribute, value, bytes) };
            self.check("cublasLtMatmulPreferenceSetAttribute", key, status)
        };
        let workspace = PRODUCT_WORKSPACE as u64;
        prefer(cublaslt::PREFERENCE_WORKSPACE, std::ptr::from_ref(&workspace).cast(), size_of::<u64>())?;
        // A result is rounded once: parts of a split sum must not meet in its type.
        let reductions = cublaslt::REDUCTIONS_IN_COMPUTE_TYPE;
        prefer(cublaslt::PREFERENCE_REDUCTIONS, std::ptr::from_ref(&reductions).cast(), size_of::<u32>())?;
        let [of_left, of_right, of_added, of_out] = key.alignment;
        for (attribute, alignment) in [
            (cublaslt::PREFERENCE_ALIGNMENT_LEFT, of_right),
            (cublaslt::PREFERENCE_ALIGNMENT_RIGHT, of_left),
            (cublaslt::PREFERENCE_ALIGNMENT_ADDED, of_added),
            (cublaslt::PREFERENCE_ALIGNMENT_RESULT, of_out),
        ] {
            prefer(attribute, std::ptr::from_ref(&alignment).cast(), size_of::<u32>())?;
        }
        let (mut choices, mut found) = (vec![Choice::default(); most], 0);
        let [left, right, out] = layouts;
        // SAFETY: live descriptions, and room for as many choices as are asked for.
        let status = unsafe {
            (lib.heuristic)(
                self.handle.handle,
                product.handle,
                left.handle,
                right.handle,
                other.as_ref().unwrap_or(out).handle,
                out.handle,
                preference.handle,
                most as c_int,
                choices.as_mut_ptr(),
                &mut found,
            )
        };
        self.check("cublasLtMatmulAlgoGetHeuristic", key, status)?;
        let usable = choices.iter().take(found as usize).take_while(|choice| choice.status == 0);
        Ok(usable.map(|choice| choice.algorithm).collect())
    }

    fn check(&self, call: &str, key: &Key, status: Status) -> Result<()> {
        if status == 0 { Ok(()) } else { Err(self.refusal(call, key, status)) }
    }

    fn refusal(&self, call: &str, key: &Key, status: Status) -> Error {
        let Key { m, n, k, inputs, output, .. } = key;
        let gpu = self.gpu.ordinal();
        Error::System {
            what: format!(
                "a product of {m} x {k} and {k} x {n} from {inputs} to {output} on GPU {gpu} ({call})"
            ),
            source_text: CublasLt::text(status),
        }
    }
}

fn object(
    library: &Arc<CublasLt>,
    call: &str,
    destroy: unsafe extern "C" fn(Handle) -> Status,
    create: impl FnOnce(*mut Handle) -> Status,
) -> Result<Object> {
    let mut handle = std::ptr::null_mut();
    match create(&mut handle) {
        0 => Ok(Object { handle, destroy, _library: library.clone() }),
        status => Err(Error::System { what: call.to_string(), source_text: CublasLt::text(status) }),
    }
}

fn data_type(dtype: DType) -> Result<c_int> {
    match dtype {
        DType::F32 => Ok(cublaslt::TYPE_F32),
        DType::F16 => Ok(cublaslt::TYPE_F16),
        DType::Bf16 => Ok(cublaslt::TYPE_BF16),
        other => Err(Error::System {
            what: format!("a product of {other}"),
            source_text: "f32, f16 and bf16 are possible".into(),
        }),
    }
}
