//! Mirrors of the parameter structs of kernels/attention, byte for byte. `tests` compares the offset of every field with the sources.

use super::backward_call::{BackwardTensors, Delta};
use super::call::{Descales, Tensors};
use super::kernels::{Kernels, Variant};
use super::sizes::outer_strides;
use super::terms::DeviceCall;
use super::tile::Split;
use crate::attention::AttentionShape;
use crate::cuda::{DevicePtr, Element};
use bytemuck::{Pod, Zeroable};

/// The C++ name of a field, where it has another.
#[cfg(test)]
macro_rules! name_of {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident $name:literal) => {
        $name
    };
}

/// Structs of the host, each with the struct of the kernels that it mirrors, the file that has it, and the macro that it is compiled with.
/// An array represents consecutive fields and has the name of the first.
macro_rules! mirrors {
    ($($(#[$doc:meta])* $mirror:ident is $name:ident of $file:literal $(with $define:ident)? {
        $($field:ident $(as $other:literal)?: $type:ty,)*
    })*) => {
        $(
            $(#[$doc])*
            #[doc = concat!("`", stringify!($name), "` of `", $file, "`.")]
            #[derive(Clone, Copy, Debug, Pod, Zeroable)]
            #[repr(C)]
            pub(super) struct $mirror {
                $(pub $field: $type,)*
            }
        )*

        #[cfg(test)]
        fn mirrors() -> Vec<tests::Mirror> {
            vec![$(tests::Mirror {
                name: stringify!($name),
                file: $file,
                define: [$(stringify!($define))?].first().copied(),
                size: size_of::<$mirror>(),
                fields: vec![$((name_of!($field $($other)?), std::mem::offset_of!($mirror, $field)),)*],
            },)*]
        }
    };
}

mirrors! {
    /// Pointers may be 0 where the kernel says so; strides count elements.
    Forward is Params of "attention/params.cuh" {
        o: u64,
        lse: u64,
        q_descale: u64,
        k_descale: u64,
        v_descale: u64,
        o_descale: u64,
        logit_descale: u64,
        telemetry: u64,
        counter: u64,
        o_strides as "o_stride_batch": [i64; 3],
        q_descale_strides as "q_descale_batch": [i64; 2],
        k_descale_strides as "k_descale_batch": [i64; 2],
        v_descale_strides as "v_descale_batch": [i64; 2],
        o_descale_strides as "o_descale_batch": [i64; 2],
        softmax_scale: f32,
        batch: i32,
        heads_q: i32,
        heads_kv: i32,
        len_q: i32,
        len_k: i32,
        pack_gqa: i32,
        row_blocks: i32,
        units: i32,
        section: i32,
        o_partial: u64,
        lse_partial: u64,
        causal_offset: i32,
        splits: i32,
        active_consumers: i32,
        tile_heads: i32,
        positions: i32,
        tile_heads_reciprocal: i32,
        units_per_batch: i32,
        out_e4m3: i32,
        extremes_partial: u64,
        sinks: u64,
        schedule: u64,
        value_center as "v_center": u64,
        window as "window_left": [i32; 2],
        soft_cap: f32,
        columns: i32,
    }

    /// The same where the kernel keeps each row's largest P, or what the rounding of the output took.
    ForwardKeeping is Params of "attention/params.cuh" with ROW_MAX {
        forward as "o": Forward,
        kept as "row_max": u64,
    }

    Combine is CombineParams of "attention/params.cuh" {
        o: u64,
        lse: u64,
        o_descale: u64,
        telemetry: u64,
        o_partial: u64,
        lse_partial: u64,
        extremes_partial: u64,
        v_descale: u64,
        o_strides as "o_stride_batch": [i64; 3],
        o_descale_strides as "o_descale_batch": [i64; 2],
        v_descale_strides as "v_descale_batch": [i64; 2],
        batch: i32,
        heads_q: i32,
        heads_kv: i32,
        len_q: i32,
        splits: i32,
        out_e4m3: i32,
        log2_row_warps: i32,
        columns: i32,
        sinks: u64,
        sequences: Sequences,
        sequence_splits: u64,
        counts: u64,
        joins: u64,
        block_rows: i32,
        unused: i32,
        value_center as "v_center": u64,
    }

    /// Null where all are alike.
    Sequences is Sequences of "attention/sequences.cuh" {
        q_starts: u64,
        q_ends: u64,
        k_starts: u64,
        k_ends: u64,
        count: i32,
        unused: i32,
    }

    Schedule is ScheduleParams of "attention/schedule.cuh" {
        schedule: u64,
        sequence_splits: u64,
        sequences: Sequences,
        rows as "rows_q": [i32; 2],
        lengths as "len_q": [i32; 2],
        window as "window_left": [i32; 2],
        tile_rows: i32,
        tile_keys: i32,
        units: i32,
        capacity: i32,
        most_splits: i32,
        item_time: i32,
        key_tile_time: i32,
        combine_time: i32,
    }

    CastRows is CastRows of "attention/cast_rows.cuh" {
        schedule: Schedule,
        o: u64,
        lse: u64,
        o_strides as "o_stride_batch": [i64; 3],
        o_size: i32,
        heads_q: i32,
        value_groups: i32,
        first_key: i32,
    }

    /// `CastTensor` of `cast_qkv.cu`; also the parameter of `repack_v`.
    CastTensor is CastTensor of "attention/cast_qkv.cu" {
        from as "in": u64,
        to as "out": u64,
        descale: u64,
        stats: u64,
        center: u64,
        strides as "stride_batch": [i64; 3],
        descale_strides as "descale_batch": [i64; 2],
        length: i32,
        heads: i32,
    }

    Cast is CastParams of "attention/cast_qkv.cu" {
        q: CastTensor,
        k: CastTensor,
        v: CastTensor,
        cosine: u64,
        sine: u64,
        positions: u64,
        counter: u64,
        v_rows: u64,
        rotary: i32,
        q_start: i32,
        v_f16: i32,
        table_rows: i32,
    }

    BlockTable is BlockTable of "attention/pages.cuh" {
        pages: u64,
        lengths: u64,
        stride: i64,
        pages_per_sequence: i32,
        log2_page_size: i32,
        count: i32,
        added: i32,
    }

    Queries is Queries of "attention/pages.cuh" {
        cu_seqlens: u64,
        length: i32,
        block: i32,
    }

    Paged is PagedParams of "attention/pages.cuh" {
        table: BlockTable,
        counts: u64,
        parts: u64,
    }

    AppendTensor is AppendTensor of "attention/append.cu" {
        from as "in": u64,
        to as "out": u64,
        descale: u64,
        stats: u64,
        center: u64,
        strides as "stride_sequence": [i64; 3],
        descale_strides as "descale_sequence": [i64; 2],
        page_strides as "out_page": [i64; 3],
        length: i32,
        heads: i32,
    }

    Append is AppendParams of "attention/append.cu" {
        q: AppendTensor,
        k: AppendTensor,
        v: AppendTensor,
        table: BlockTable,
        queries: Queries,
        cosine: u64,
        sine: u64,
        counter: u64,
        counts: u64,
        parts: u64,
        joins: u64,
        rotary: i32,
        positions: i32,
        v_rows: i32,
        sequences: i32,
        window_left: i32,
        units: i32,
        most_blocks: i32,
        partial_rows: i32,
        parts_asked: i32,
        part_tiles: i32,
        tile_time: f32,
        item_time: f32,
        join_time: f32,
        block_time: f32,
        reading_time: f32,
        processors: i32,
    }

    /// `Backward` of `backward.cuh`. Pointers may be 0 where they say so; strides count elements.
    Backward is Backward of "attention/backward.cuh" {
        q: u64,
        k: u64,
        v: u64,
        o: u64,
        d_out: u64,
        lse: u64,
        delta: u64,
        dq: u64,
        dk: u64,
        dv: u64,
        dq_sum: u64,
        terms: u64,
        turns: u64,
        q_descale: u64,
        k_descale: u64,
        v_descale: u64,
        q_strides: [i64; 3],
        k_strides: [i64; 3],
        v_strides: [i64; 3],
        o_strides: [i64; 3],
        d_out_strides: [i64; 3],
        dq_strides: [i64; 3],
        dk_strides: [i64; 3],
        dv_strides: [i64; 3],
        q_descale_strides: [i64; 2],
        k_descale_strides: [i64; 2],
        v_descale_strides: [i64; 2],
        softmax_scale: f32,
        batch: i32,
        heads_q: i32,
        heads_kv: i32,
        len_q: i32,
        len_k: i32,
        q_tiles: i32,
        diagonal: i32,
        section: i32,
        d: i32,
        sequences: Sequences,
        sinks: u64,
        d_sinks: u64,
        sink_parts: u64,
        value_center as "v_center": u64,
        soft_cap: f32,
        window_left: i32,
        window_right: i32,
        d_v: i32,
    }

    Fp8Backward is Backward of "attention/backward.cuh" with DQ8 {
        backward as "q": Backward,
        row_max: u64,
        value_norm as "v_norm": u64,
        value_norm_strides as "v_norm_strides": [i64; 2],
    }

    /// What follows them in the first kernel where delta is that of the output before its rounding.
    UnroundedBackward is Backward of "attention/backward.cuh" with RESIDUAL {
        backward as "q": Backward,
        residual: u64,
        residual_strides: [i64; 3],
    }
}

impl Forward {
    /// What the attention kernels take of a call, whichever way it is cut.
    pub fn of<V: Variant>(call: &DeviceCall, t: &Tensors, counter: DevicePtr, kernels: &Kernels<V>) -> Self {
        let (sizes, Descales { q, k, v, o, logit }) = (&call.shape, &t.descales);
        let [q, k, v, o] = [q, k, v, o].map(|d| kernels.descale(d.as_ref()));
        Self {
            o: t.out.ptr().0,
            lse: t.lse.map_or(0, |x| x.ptr().0),
            q_descale: q.0,
            k_descale: k.0,
            v_descale: v.0,
            o_descale: o.0,
            logit_descale: logit.map_or(0, |x| x.ptr().0),
            telemetry: t.stats.map_or(0, |x| x.ptr().0),
            counter: counter.0,
            o_strides: outer_strides(&t.out),
            q_descale_strides: q.1,
            k_descale_strides: k.1,
            v_descale_strides: v.1,
            o_descale_strides: o.1,
            softmax_scale: call.softmax_scale as f32,
            batch: sizes.batch as i32,
            heads_q: sizes.n_q_heads as i32,
            heads_kv: sizes.n_kv_heads as i32,
            len_q: sizes.len_q as i32,
            len_k: sizes.len_k as i32,
            sinks: call.sinks.map_or(0, |x| x.ptr().0),
            value_center: call.value_center().map_or(0, |x| x.ptr().0),
            window: call.window(),
            soft_cap: call.soft_cap.map_or(0.0, |cap| cap as f32),
            columns: sizes.d_v as i32,
            ..Zeroable::zeroed()
        }
    }

    /// The rows of a tile of a split call, and where partial results go.
    pub fn split_by(&mut self, split: &Split, sizes: &AttentionShape, [o, lse, extremes]: [DevicePtr; 3]) {
        [self.o_partial, self.lse_partial, self.extremes_partial] = [o.0, lse.0, extremes.0];
        self.active_consumers = split.consumers as i32;
        self.tile_heads = split.heads as i32;
        self.positions = split.positions as i32;
        self.tile_heads_reciprocal = (1usize << 16).div_ceil(split.heads) as i32;
        self.units_per_batch = (sizes.n_q_heads / split.heads) as i32;
    }
}

impl Combine {
    /// What it shares with the kernel in front of it.
    pub fn of(forward: &Forward) -> Self {
        Self {
            o: forward.o,
            lse: forward.lse,
            o_descale: forward.o_descale,
            telemetry: forward.telemetry,
            o_partial: forward.o_partial,
            lse_partial: forward.lse_partial,
            extremes_partial: forward.extremes_partial,
            v_descale: forward.v_descale,
            o_strides: forward.o_strides,
            o_descale_strides: forward.o_descale_strides,
            v_descale_strides: forward.v_descale_strides,
            batch: forward.batch,
            heads_q: forward.heads_q,
            heads_kv: forward.heads_kv,
            len_q: forward.len_q,
            out_e4m3: forward.out_e4m3,
            columns: forward.columns,
            value_center: forward.value_center,
            ..Zeroable::zeroed()
        }
    }
}

impl Sequences {
    /// The lists of a call.
    pub fn of(call: &DeviceCall) -> Self {
        call.sequences.as_ref().map_or_else(Self::zeroed, |lists| Self {
            q_starts: lists.q_starts.ptr().0,
            q_ends: lists.q_ends.ptr().0,
            k_starts: lists.k_starts.ptr().0,
            k_ends: lists.k_ends.ptr().0,
            count: lists.count() as i32,
            unused: 0,
        })
    }
}

impl Backward {
    /// What the kernels take of a call, whichever way it is cut.
    pub fn of<V: Variant>(call: &DeviceCall, t: &BackwardTensors, kernels: &Kernels<V>) -> Self {
        let sizes = &call.shape;
        let [q, k, v] = [&t.descales.q, &t.descales.k, &t.descales.v].map(|d| kernels.descale(d.as_ref()));
        let (o, o_strides, delta) = match &t.delta {
            Delta::Output(out) | Delta::Unrounded { out, .. } => (out.ptr().0, outer_strides(out), 0),
            Delta::Given(delta) => (0, [0; 3], delta.ptr().0),
        };
        let [window_left, window_right] = call.window();
        Self {
            q: t.q.ptr().0,
            k: t.k.ptr().0,
            v: t.v.ptr().0,
            o,
            d_out: t.d_out.ptr().0,
            lse: t.lse.ptr().0,
            delta,
            dq: t.dq.ptr().0,
            dk: t.dk.ptr().0,
            dv: t.dv.ptr().0,
            q_descale: q.0,
            k_descale: k.0,
            v_descale: v.0,
            q_strides: outer_strides(&t.q),
            k_strides: outer_strides(&t.k),
            v_strides: outer_strides(&t.v),
            o_strides,
            d_out_strides: outer_strides(&t.d_out),
            dq_strides: outer_strides(&t.dq),
            dk_strides: outer_strides(&t.dk),
            dv_strides: outer_strides(&t.dv),
            q_descale_strides: q.1,
            k_descale_strides: k.1,
            v_descale_strides: v.1,
            batch: sizes.batch as i32,
            heads_q: sizes.n_q_heads as i32,
            heads_kv: sizes.n_kv_heads as i32,
            len_q: sizes.len_q as i32,
            len_k: sizes.len_k as i32,
            softmax_scale: call.softmax_scale as f32,
            diagonal: sizes.len_k as i32 - sizes.len_q as i32,
            d: sizes.d_head as i32,
            d_v: sizes.d_v as i32,
            sequences: Sequences::of(call),
            sinks: call.sinks.map_or(0, |x| x.ptr().0),
            d_sinks: t.d_sinks.map_or(0, |x| x.ptr().0),
            value_center: call.value_center().map_or(0, |x| x.ptr().0),
            soft_cap: call.soft_cap.map_or(0.0, |cap| cap as f32),
            window_left,
            window_right,
            ..Zeroable::zeroed()
        }
    }
}

/// The number that `cast_qkv` knows an input type by.
pub(super) fn input_number(element: Element) -> Option<u32> {
    match element {
        Element::Bf16 => Some(0),
        Element::F16 => Some(1),
        Element::F32 => Some(2),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::mirrors;
    use crate::cuda::{self, Arch, Request, sources};
    use crate::error::Error;

    /// A struct of the host beside that of the kernels.
    #[derive(Clone, Debug)]
    pub(super) struct Mirror {
        pub name: &'static str,
        pub file: &'static str,
        pub define: Option<&'static str>,
        pub size: usize,
        /// C++ names and offsets.
        pub fields: Vec<(&'static str, usize)>,
    }

    /// Compiles a file of the kernels with claims about it, which the compiler checks.
    fn compile(file: &str, define: Option<&'static str>, claims: &str) -> Result<(), Error> {
        let of_file = sources::ALL.iter().find(|source| file.strip_suffix(".cu") == Some(source.name));
        let text = of_file.map_or_else(|| format!("#include \"{file}\"\n"), |source| source.text.to_owned());
        // A source lives as long as the program.
        let text: &'static str = Box::leak(format!("{text}\n{claims}").into_boxed_str());
        let request = Request::new(sources::Source { name: "claims", text }, Arch::SM90A);
        let request = define.into_iter().fold(request, |request, define| request.define(define, 1));
        cuda::compile(&request).map(drop)
    }

    impl Mirror {
        fn check(&self) -> Result<(), Error> {
            let Self { name, file, define, size, fields } = self;
            let offsets = fields.iter().map(|(field, offset)| {
                // As the compiler's own `offsetof` is made.
                let have = format!("__INTADDR__(&(({name}*)0)->{field})");
                format!("static_assert({have} == {offset}, \"{name}::{field}\");\n")
            });
            let size = format!("static_assert(sizeof({name}) == {size}, \"{name}\");\n");
            compile(file, *define, &(offsets.collect::<String>() + &size))
        }
    }

    fn has_compiler(test: &str) -> bool {
        let version = cuda::compiler_version();
        if let Err(error) = &version {
            println!("ignored: {test}: {error}");
        }
        version.is_ok()
    }

    #[test]
    fn every_field_lies_where_the_kernels_read_it() {
        if !has_compiler("every_field_lies_where_the_kernels_read_it") {
            return;
        }
        let mut all = mirrors();
        // The one address that kernels keep rows at has two names.
        let mut residual = all.iter().find(|mirror| mirror.define == Some("ROW_MAX")).cloned().unwrap();
        (residual.define, residual.fields[1].0) = (Some("RESIDUAL"), "residual");
        all.push(residual);
        for mirror in &all {
            mirror.check().unwrap_or_else(|error| panic!("{}: {error}", mirror.name));
        }
    }

    #[test]
    fn two_fields_in_each_others_place_are_found() {
        if !has_compiler("two_fields_in_each_others_place_are_found") {
            return;
        }
        for mut mirror in mirrors().into_iter().filter(|mirror| ["Params", "CastTensor"].contains(&mirror.name)) {
            let (first, second) = (mirror.fields[0].1, mirror.fields[1].1);
            (mirror.fields[0].1, mirror.fields[1].1) = (second, first);
            let error = mirror.check().unwrap_err().to_string();
            assert!(error.contains(&format!("{}::{}", mirror.name, mirror.fields[0].0)), "{error}");
        }
    }

    /// What neither a macro tells the kernels nor a constant of theirs the host.
    #[test]
    fn numbers_of_the_host_are_those_of_the_kernels() {
        use crate::device::attention::{engine, paged, sizes, terms, tile};
        if !has_compiler("numbers_of_the_host_are_those_of_the_kernels") {
            return;
        }
        let claims = [
            ("attention/mask.cuh", format!("kNoWindow == {}", terms::NO_WINDOW)),
            ("attention/sequences.cuh", format!("kValueTile == {}", sizes::VALUE_TILE)),
            ("attention/config.cuh", format!("kRows == {}", tile::ROWS)),
            ("attention/cast_qkv.cu", format!("kHeads == {} && kKeys == {}", engine::CAST_HEADS, engine::CAST_ROWS)),
            ("attention/append.cu", format!("kHeads == {} && kKeys == {}", paged::APPEND_HEADS, paged::APPEND_ROWS)),
            ("attention/combine.cu", format!("kWarps == {}", tile::Split::JOINING_WARPS)),
        ];
        for (file, claim) in claims {
            compile(file, None, &format!("static_assert({claim}, \"\");\n"))
                .unwrap_or_else(|error| panic!("{file}: {claim}: {error}"));
        }
    }
}
