"""PTX instructions for tensor cores that numba does not provide.

Matrix products are marked as having side effects. All 32 threads of a warp must execute them
together, so the compiler must not move them into code that only some threads reach.
"""

from collections.abc import Callable
from typing import Any

import numba.cuda
from llvmlite import ir
from numba.cuda.extending import intrinsic

types: Any = numba.cuda.types  # pyright: ignore[reportAttributeAccessIssue]
_INT32, _INT64, _FLOAT, _VOID = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.VoidType()
_INTS, _FLOATS = (ir.LiteralStructType([number] * 4) for number in (_INT32, _FLOAT))


def _instruction(
    signature: Any, result: Any, text: str, constraints: str, *, side_effect: bool = True
) -> tuple[Any, Callable[..., Any]]:
    """Return the signature and the code generator of one instruction."""

    def generate(context, builder, signature, arguments):
        function = ir.FunctionType(result, [argument.type for argument in arguments])
        assembly = ir.InlineAsm(function, text, constraints, side_effect=side_effect)
        value = builder.call(assembly, arguments)
        if result is _VOID:
            return context.get_dummy_value()
        if result in (_INTS, _FLOATS):
            fields = [builder.extract_value(value, i) for i in range(4)]
            return context.make_tuple(builder, signature.return_type, fields)
        return value

    return signature, generate


def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Return the address of an array argument."""
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.ptrtoint(data, _INT64)


def repeated(body: Any, n: int) -> Any:
    """Return a function that calls ``body(i, ...)`` for i = 0 ... n - 1 without a loop."""

    @intrinsic
    def calls(typing_context, *arguments):
        function = body._numba_type_
        call = function.get_call_type(typing_context, (types.int64, *arguments), {})

        def generate(context, builder, signature, values):
            del signature
            others = [builder.extract_value(values[0], i) for i in range(len(arguments))]
            for i in range(n):
                context.get_function(function, call)(builder, (_INT64(i), *others))
            return context.get_dummy_value()

        return types.void(types.StarArgTuple(arguments)), generate

    return calls


def _matrix_product(dtype: str) -> Callable[..., Any]:
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    word, number = types.uint32, types.float32
    signature = types.UniTuple(number, 4)(*[word] * 6, *[number] * 4)

    @intrinsic
    def mma(_, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        del a0, a1, a2, a3, b0, b1, c0, c1, c2, c3
        return _instruction(signature, _FLOATS, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")

    return mma


mma_float16 = _matrix_product("f16")
mma_bfloat16 = _matrix_product("bf16")


@intrinsic
def and_xor(_, a, mask, b):
    """Return (a & mask) ^ b in one instruction."""
    del a, mask, b
    word, text = types.uint32, "lop3.b32 $0, $1, $2, $3, 0x6a;"
    return _instruction(word(word, word, word), _INT32, text, "=r,r,r,r", side_effect=False)


@intrinsic
def opaque_copy(_, word):
    """Return a copy of ``word`` for which the compiler cannot reuse results from ``word``."""
    del word
    return _instruction(types.uint32(types.uint32), _INT32, "mov.b32 $0, $1;", "=r,r")


@intrinsic
def shared_address(_, array):
    """Return the 32-bit address of an array in shared memory."""
    text = "cvta.to.shared.u64 $0, $1;"
    _, convert = _instruction(None, _INT64, text, "=l,l", side_effect=False)

    def generate(context, builder, signature, arguments):
        start = _address(context, builder, signature, arguments)
        return builder.trunc(convert(context, builder, signature, [start]), _INT32)

    return types.uint32(array), generate


@intrinsic
def global_address(_, array):
    """Return the address of an array in global memory."""
    return types.uint64(array), _address


@intrinsic
def copy_async(_, destination, source, n_bytes):
    """Start to copy 16 bytes to shared memory. Bytes beyond ``n_bytes`` become zeros."""
    del destination, source, n_bytes
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    signature = types.void(types.uint32, types.uint64, types.uint32)
    return _instruction(signature, _VOID, text, "r,l,r,~{memory}")


@intrinsic
def wait_for_copies(_):
    """Wait for all copies that this thread has started."""
    return _instruction(types.void(), _VOID, "cp.async.wait_all;", "~{memory}")


@intrinsic
def load_matrices(_, address):
    """Return this thread's register for each of four 8 x 8 matrices of 16-bit numbers."""
    del address
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];"
    signature = types.UniTuple(types.uint32, 4)(types.uint32)
    return _instruction(signature, _INTS, text, "=r,=r,=r,=r,r,~{memory}")
