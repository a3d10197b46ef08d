"""PTX instructions for tensor cores that numba does not provide.

Matrix products are marked as having side effects. All 32 threads of a warp must execute them
together, so the compiler must not move them into code that only some threads reach.
"""

from inspect import Parameter, Signature
from typing import Any

import numba.cuda
from llvmlite import ir
from numba.cuda.extending import intrinsic

types: Any = numba.cuda.types  # pyright: ignore[reportAttributeAccessIssue]
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_WORD, _WORDS = types.uint32, types.UniTuple(types.uint32, 4)
_NUMBER, _NUMBERS = types.float32, types.UniTuple(types.float32, 4)
_LLVM_TYPES = {
    types.void: ir.VoidType(),
    _WORD: _INT32,
    _WORDS: ir.LiteralStructType([_INT32] * 4),
    _NUMBERS: ir.LiteralStructType([ir.FloatType()] * 4),
}


def _instruction(
    text: str, constraints: str, result: Any, *arguments: Any, side_effect: bool = True
) -> Any:
    """Return a device function that executes one PTX instruction, given as text."""

    def generate(context, builder, signature, values):
        function = ir.FunctionType(_LLVM_TYPES[result], [value.type for value in values])
        assembly = ir.InlineAsm(function, text, constraints, side_effect=side_effect)
        value = builder.call(assembly, values)
        if result == types.void:
            return context.get_dummy_value()
        if result in (_WORDS, _NUMBERS):
            fields = [builder.extract_value(value, i) for i in range(4)]
            return context.make_tuple(builder, signature.return_type, fields)
        return value

    def typed(*_):
        return result(*arguments), generate

    # Numba reads the number of arguments from the signature. The first argument is its context.
    names = "context", *(f"argument_{i}" for i in range(len(arguments)))
    typed.__signature__ = Signature([
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names
    ])
    return intrinsic(typed)


def repeated(body: Any, n: int) -> Any:
    """Return a function that calls ``body(i, ...)`` with the constants i = 0, ..., n - 1."""

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


def _matrix_product(dtype: str) -> Any:
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    )
    constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    return _instruction(text, constraints, _NUMBERS, *[_WORD] * 6, *[_NUMBER] * 4)


mma_float16 = _matrix_product("f16")
mma_bfloat16 = _matrix_product("bf16")

# Compute (a & mask) ^ b for the arguments a, mask and b.
and_xor = _instruction(
    "lop3.b32 $0, $1, $2, $3, 0x6a;", "=r,r,r,r", _WORD, _WORD, _WORD, _WORD, side_effect=False
)

# Copy a word. The compiler cannot see that the copy equals the word. Therefore it computes results
# from the copy again, instead of keeping the results for the word in registers.
opaque_copy = _instruction("mov.b32 $0, $1;", "=r,r", _WORD, _WORD)

# Start to copy 16 bytes to shared memory. The arguments are the destination, the source and the
# number of bytes to read. The other bytes become zeros.
copy_async = _instruction(
    *("cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r,~{memory}"),
    *(types.void, _WORD, types.uint64, _WORD),
)

# Wait for all copies that this thread has started.
wait_for_copies = _instruction("cp.async.wait_all;", "~{memory}", types.void)

# Load four 8 x 8 matrices of 16-bit numbers, spread over the threads of a warp. The argument is the
# address of a matrix row. The results are this thread's registers, one for each matrix.
load_matrices = _instruction(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];",
    "=r,=r,=r,=r,r,~{memory}",
    _WORDS,
    _WORD,
)


def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Return the address of an array argument."""
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.ptrtoint(data, _INT64)


@intrinsic
def global_address(_, array):
    """Return the address of an array in global memory."""
    return types.uint64(array), _address


@intrinsic
def shared_address(_, array):
    """Return the 32-bit address of an array in shared memory."""

    def generate(context, builder, signature, arguments):
        function = ir.FunctionType(_INT64, [_INT64])
        convert = ir.InlineAsm(function, "cvta.to.shared.u64 $0, $1;", "=l,l")
        start = _address(context, builder, signature, arguments)
        return builder.trunc(builder.call(convert, [start]), _INT32)

    return types.uint32(array), generate
