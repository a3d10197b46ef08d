"""The instructions of the tensor cores' data path that numba has no name for, as inline PTX.

Names and meanings are those of ``ptx_simulated.py``. The matrix products are marked as having side
effects: all 32 threads of a warp must run them together, and the compiler may not move them into
code that only some threads reach.
"""

from collections.abc import Callable
from typing import Any

import numba.cuda
from llvmlite import ir
from numba.cuda.extending import intrinsic

types: Any = numba.cuda.types  # pyright: ignore[reportAttributeAccessIssue]
_INT32, _INT64, _FLOAT, _VOID = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.VoidType()


def _assemble(builder, result, arguments, text, constraints, side_effect):
    function = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(
        ir.InlineAsm(function, text, constraints, side_effect=side_effect), arguments
    )


def _unpack(context, builder, signature, struct):
    fields = [builder.extract_value(struct, i) for i in range(len(signature.return_type))]
    return context.make_tuple(builder, signature.return_type, fields)


def repeated(body: Any, n: int) -> Any:
    """Return what calls a device function with first arguments 0 ... n - 1, without a loop."""

    @intrinsic
    def calls(typing_context, *arguments):
        function = body._numba_type_
        call = function.get_call_type(typing_context, (types.int64, *arguments), {})

        def generate(context, builder, signature, values):
            del signature
            rest = [builder.extract_value(values[0], i) for i in range(len(arguments))]
            for i in range(n):
                context.get_function(function, call)(builder, (_INT64(i), *rest))
            return context.get_dummy_value()

        return types.void(types.StarArgTuple(arguments)), generate

    return calls


def _matrix_product(dtype: str) -> Callable[..., Any]:
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )

    @intrinsic
    def mma(typing_context, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        del typing_context, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3
        word, number = types.uint32, types.float32

        def generate(context, builder, signature, arguments):
            struct = _assemble(
                builder,
                ir.LiteralStructType([_FLOAT] * 4),
                arguments,
                text,
                "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
                side_effect=True,
            )
            return _unpack(context, builder, signature, struct)

        return types.UniTuple(number, 4)(*[word] * 6, *[number] * 4), generate

    return mma


mma_float16 = _matrix_product("f16")
mma_bfloat16 = _matrix_product("bf16")


@intrinsic
def and_xor(typing_context, a, mask, b):
    """Return (a & mask) ^ b in one instruction."""
    del typing_context, a, mask, b

    def generate(context, builder, signature, arguments):
        del context, signature
        text = "lop3.b32 $0, $1, $2, $3, 0x6a;"
        return _assemble(builder, _INT32, arguments, text, "=r,r,r,r", side_effect=False)

    word = types.uint32
    return word(word, word, word), generate


@intrinsic
def anew(typing_context, word):
    """Return the word as if it were another each time: what is made of it is not kept for later."""
    del typing_context, word

    def generate(context, builder, signature, arguments):
        del context, signature
        return _assemble(builder, _INT32, arguments, "mov.b32 $0, $1;", "=r,r", side_effect=True)

    return types.uint32(types.uint32), generate


@intrinsic
def shared_address(typing_context, array):
    """Return where a shared array starts, in the shared window's 32-bit addresses."""
    del typing_context

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        wide = [builder.ptrtoint(data, _INT64)]
        text = "cvta.to.shared.u64 $0, $1;"
        address = _assemble(builder, _INT64, wide, text, "=l,l", side_effect=False)
        return builder.trunc(address, _INT32)

    return types.uint32(array), generate


@intrinsic
def global_address(typing_context, array):
    """Return where an array in global memory starts."""
    del typing_context

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, _INT64)

    return types.uint64(array), generate


def _statement(text: str, constraints: str, signature: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the signature and the generator of an instruction that returns nothing."""

    def generate(context, builder, signature, arguments):
        del signature
        _assemble(builder, _VOID, arguments, text, constraints, side_effect=True)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def copy_async(typing_context, destination, source, n_bytes):
    """Begin to copy 16 bytes to shared memory, those past ``n_bytes`` as zeros."""
    del typing_context, destination, source, n_bytes
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    signature = types.void(types.uint32, types.uint64, types.uint32)
    return _statement(text, "r,l,r,~{memory}", signature)


@intrinsic
def wait_for_copies(typing_context):
    """Wait for all copies this thread began."""
    del typing_context
    return _statement("cp.async.wait_all;", "~{memory}", types.void())


@intrinsic
def load_matrices(typing_context, address):
    """Return one register of each of four 8 x 8 matrices of 16-bit numbers (ldmatrix.x4)."""
    del typing_context, address

    def generate(context, builder, signature, arguments):
        struct = _assemble(
            builder,
            ir.LiteralStructType([_INT32] * 4),
            arguments,
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];",
            "=r,=r,=r,=r,r,~{memory}",
            side_effect=True,
        )
        return _unpack(context, builder, signature, struct)

    return types.UniTuple(types.uint32, 4)(types.uint32), generate
