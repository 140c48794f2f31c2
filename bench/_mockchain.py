"""A chain of true hashes for the mock node: headers link, and commit to the transactions and receipts of their block.

Most blocks are empty. Others hold logs of the two watched topics, half of these from contracts that nobody registered,
in blocks of their own. Such a block has two foreign transfers and one transaction for each of its logs. Everything is
a function of the numbers of blocks, logs and vaults.
"""

from __future__ import annotations

import hashlib
import json
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from eth_hash.auto import keccak

from vaultevents.core.logs import ETHER_FUNDED, WITHDRAWAL_CLAIMED
from vaultevents.devnet.encoding import minimal
from vaultevents.devnet.header import EMPTY_UNCLES_HASH, NO_REQUESTS_HASH, bloom_bits

CHAIN_ID = 31337
GENESIS_S = 1_700_000_000
GAS_PER_TRANSACTION = 90_000
TRANSFERS = 2
"""Transactions of each block with logs that come before those of the watched topics; each has one log."""

_TRANSFER = keccak(b"Transfer(address,address,uint256)")
_PATTERNS = 8
_SCALAR = bytes(range(1, 33))  # stands for both halves of a signature


def vault(number: int) -> bytes:
    return hashlib.sha256(b"vault %d" % number).digest()[:20]


def queue(number: int) -> bytes:
    return hashlib.sha256(b"queue %d" % number).digest()[:20]


def _stranger(number: int) -> bytes:
    return hashlib.sha256(b"stranger %d" % number).digest()[:20]


def time_s(number: int) -> int:
    return GENESIS_S + 12 * number


def rlp_text(value: bytes) -> bytes:
    size = len(value)
    if size == 1 and value[0] < 0x80:
        return value
    return bytes([0x80 + size]) + value if size < 56 else _long(0xB7, size) + value


def rlp_list(payload: bytes) -> bytes:
    size = len(payload)
    return bytes([0xC0 + size]) + payload if size < 56 else _long(0xF7, size) + payload


def _long(base: int, size: int) -> bytes:
    digits = minimal(size)
    return bytes([base + len(digits)]) + digits


def rlp_number(number: int) -> bytes:
    return rlp_text(minimal(number))


EMPTY_ROOT = keccak(rlp_text(b""))
_NO_BLOOM = bytes(256)


def small_root(values: list[bytes]) -> bytes:
    """The root of the trie of at most 16 values of at least 32 bytes each, by their positions."""
    if not values:
        return EMPTY_ROOT
    assert len(values) <= 16
    if len(values) == 1:
        return keccak(_leaf(b"\x20\x80", values[0]))
    # The key of position 0 has the digits 8 and 0, that of another position 0 and the position.
    zero = rlp_text(keccak(_leaf(b"\x30", values[0])))
    if len(values) == 2:
        rest = keccak(_leaf(b"\x31", values[1]))
    else:
        leaves = [rlp_text(keccak(_leaf(b"\x20", value))) for value in values[1:]]
        rest = keccak(rlp_list(b"\x80" + b"".join(leaves) + b"\x80" * (16 - len(leaves))))
    return keccak(rlp_list(rlp_text(rest) + b"\x80" * 7 + zero + b"\x80" * 8))


def _leaf(path: bytes, value: bytes) -> bytes:
    return rlp_list(rlp_text(path) + rlp_text(value))


@dataclass(frozen=True, slots=True)
class Emitted:
    """A log without its place."""

    address: bytes
    topics: tuple[bytes, ...]
    data: bytes

    def rlp(self) -> bytes:
        topics = b"".join(map(rlp_text, self.topics))
        return rlp_list(rlp_text(self.address) + rlp_list(topics) + rlp_text(self.data))

    def bloom(self) -> int:
        bits = bloom_bits(self.address)
        for topic in self.topics:
            bits |= bloom_bits(topic)
        return bits


@dataclass(frozen=True, slots=True)
class Block:
    """A block with logs: its transactions' hashes, and from where on its logs stand among those of the chain.

    The first `TRANSFERS` transactions have the transfers of a pattern, each other one a log of the chain. `blooms` are
    those of the receipts.
    """

    number: int
    first_log: int
    tx_hashes: tuple[bytes, ...]
    blooms: tuple[bytes, ...]
    bloom: bytes
    receipts_root: bytes
    transactions_root: bytes

    @property
    def gas_used(self) -> int:
        return GAS_PER_TRANSACTION * len(self.tx_hashes)


@dataclass(frozen=True, slots=True)
class Chain:
    """`logs` are those of the watched topics in order, as JSON, and `places` the blocks in which they stand.

    `transactions` has block and position of each transaction, `blocks` those blocks that have logs.
    """

    last: int
    hashes: list[bytes]
    numbers: dict[bytes, int]
    blocks: dict[int, Block]
    transactions: dict[bytes, tuple[int, int]]
    places: list[int]
    logs: list[bytes]

    def block(self, number: int) -> Block:
        """The block at a height; one without logs has no transactions."""
        return self.blocks.get(number) or Block(number, 0, (), (), _NO_BLOOM, EMPTY_ROOT, EMPTY_ROOT)


def build(blocks: int, logs: int, vaults: int) -> Chain:
    """A chain with `logs` logs of the vaults and their queues, and as many of contracts that nobody registered."""
    rng = random.Random(f"{blocks}/{logs}")
    own = [rng.randint(1, blocks) for _ in range(logs)]
    taken = set(own)
    foreign: list[int] = []
    while len(foreign) < logs:
        if (place := rng.randint(1, blocks)) not in taken:
            foreign.append(place)
    emitted = [(place, _emitted(rng, at, vaults, at < logs)) for at, place in enumerate(own + foreign)]
    emitted.sort(key=lambda placed: placed[0])
    groups = [(number, list(group)) for number, group in groupby(range(len(emitted)), key=lambda at: emitted[at][0])]
    numbers, firsts = [number for number, _ in groups], [group[0] for _, group in groups]
    contents = [[emitted[at][1] for at in group] for _, group in groups]
    with ProcessPoolExecutor() as pool:
        full = dict(zip(numbers, pool.map(_block, numbers, firsts, contents, chunksize=500), strict=True))
    hashes = [bytes(32)] * (blocks + 1)
    parent = bytes(32)
    for number in range(blocks + 1):
        parent = hashes[number] = keccak(header_rlp(parent, full.get(number), number))
    return Chain(
        blocks,
        hashes,
        {block_hash: number for number, block_hash in enumerate(hashes)},
        full,
        {tx_hash: (block.number, at) for block in full.values() for at, tx_hash in enumerate(block.tx_hashes)},
        [place for place, _ in emitted],
        [
            log_json(log, block, hashes[block.number], TRANSFERS + at)
            for block in full.values()
            for at, (_, log) in enumerate(emitted[block.first_log : block.first_log + len(block.tx_hashes) - TRANSFERS])
        ],
    )


def _emitted(rng: random.Random, at: int, vaults: int, own: bool) -> Emitted:
    owner = rng.randrange(vaults)
    data = rng.randrange(10**15, 10**20).to_bytes(32)
    if rng.random() < 0.85:
        return Emitted(vault(owner) if own else _stranger(owner), (bytes(ETHER_FUNDED),), data)
    people = (bytes(12) + vault(at), bytes(12) + queue(at))
    address = queue(owner) if own else _stranger(vaults + owner)
    return Emitted(address, (bytes(WITHDRAWAL_CLAIMED), at.to_bytes(32), *people), data)


def transfer(number: int, at: int) -> Emitted:
    """What transaction `at` of block `number` emits, before those of the watched topics."""
    return _transfer(number % _PATTERNS, at)


@cache
def _transfer(pattern: int, at: int) -> Emitted:
    rng = random.Random(f"transfer/{pattern}/{at}")
    topics = (_TRANSFER, bytes(12) + rng.randbytes(20), bytes(12) + rng.randbytes(20))
    return Emitted(rng.randbytes(20), topics, rng.randrange(10**18).to_bytes(32))


@cache
def _transfer_receipt(pattern: int, at: int) -> tuple[int, bytes]:
    """The bloom, and the receipt as it is hashed."""
    log = _transfer(pattern, at)
    bloom = log.bloom()
    return bloom, _receipt(at, bloom.to_bytes(256), log)


def _block(number: int, first_log: int, logs: list[Emitted]) -> Block:
    receipts, blooms, bloom = [], [], 0
    for at in range(TRANSFERS):
        bits, receipt = _transfer_receipt(number % _PATTERNS, at)
        receipts.append(receipt)
        blooms.append(_transfer_bloom(number % _PATTERNS, at))
        bloom |= bits
    for at, log in enumerate(logs, TRANSFERS):
        bits = log.bloom()
        blooms.append(bits.to_bytes(256))
        receipts.append(_receipt(at, blooms[-1], log))
        bloom |= bits
    transactions = [transaction_rlp(number, at) for at in range(len(receipts))]
    return Block(
        number,
        first_log,
        tuple(map(keccak, transactions)),
        tuple(blooms),
        bloom.to_bytes(256),
        small_root(receipts),
        small_root(transactions),
    )


@cache
def _transfer_bloom(pattern: int, at: int) -> bytes:
    return _transfer_receipt(pattern, at)[0].to_bytes(256)


def _receipt(at: int, bloom: bytes, log: Emitted) -> bytes:
    gas = rlp_number(GAS_PER_TRANSACTION * (at + 1))
    return b"\x02" + rlp_list(b"\x01" + gas + rlp_text(bloom) + rlp_list(log.rlp()))


def nonce(number: int, at: int) -> int:
    return 16 * number + at


_FEES = b"".join(map(rlp_number, (10**9, 2 * 10**9, GAS_PER_TRANSACTION)))
_REST = rlp_number(0) + rlp_text(b"") + rlp_list(b"") + rlp_number(1) + 2 * rlp_text(_SCALAR)
_TO = bytes(19) + b"\x0a"


def transaction_rlp(number: int, at: int) -> bytes:
    """The transaction at a place, as it is hashed (EIP-1559); the nonce makes it the only one of its hash."""
    return b"\x02" + rlp_list(rlp_number(CHAIN_ID) + rlp_number(nonce(number, at)) + _FEES + rlp_text(_TO) + _REST)


def transaction_json(number: int, at: int, tx_hash: bytes, block_hash: bytes) -> bytes:
    """The same as a node gives it with a block."""
    return _TRANSACTION % (tx_hash.hex().encode(), nonce(number, at), block_hash.hex().encode(), number, at)


_TRANSACTION = (
    b'{"type":"0x2","hash":"0x%%b","nonce":"0x%%x","blockHash":"0x%%b","blockNumber":"0x%%x","transactionIndex":"0x%%x",'
    b'"from":"0x%b","to":"0x%b","chainId":"0x%x","maxPriorityFeePerGas":"0x%x","maxFeePerGas":"0x%x","gas":"0x%x",'
    b'"gasPrice":"0x%x","value":"0x0","input":"0x","accessList":[],"v":"0x1","yParity":"0x1","r":"0x%b","s":"0x%b"}'
) % (
    (bytes(19) + b"\x0b").hex().encode(),
    _TO.hex().encode(),
    CHAIN_ID,
    10**9,
    2 * 10**9,
    GAS_PER_TRANSACTION,
    2 * 10**9,
    *2 * (_SCALAR.hex().encode(),),
)


def header_fields(parent: bytes, block: Block) -> dict[str, bytes | int]:
    """All fields in the order in which they are hashed, under their JSON-RPC names."""
    return {
        "parentHash": parent,
        "sha3Uncles": EMPTY_UNCLES_HASH,
        "miner": bytes(19) + b"\xfe",
        "stateRoot": _SCALAR,
        "transactionsRoot": block.transactions_root,
        "receiptsRoot": block.receipts_root,
        "logsBloom": block.bloom,
        "difficulty": 0,
        "number": block.number,
        "gasLimit": 36_000_000,
        "gasUsed": block.gas_used,
        "timestamp": time_s(block.number),
        "extraData": b"mock",
        "mixHash": _SCALAR,
        "nonce": bytes(8),
        "baseFeePerGas": 10**9,
        "withdrawalsRoot": EMPTY_ROOT,
        "blobGasUsed": 0,
        "excessBlobGas": 0,
        "parentBeaconBlockRoot": _SCALAR,
        "requestsHash": NO_REQUESTS_HASH,
    }


def _encoded(fields: dict[str, bytes | int]) -> dict[str, bytes]:
    return {name: rlp_text(value) if isinstance(value, bytes) else rlp_number(value) for name, value in fields.items()}


_EMPTY = _encoded(header_fields(bytes(32), Block(0, 0, (), (), _NO_BLOOM, EMPTY_ROOT, EMPTY_ROOT)))
_NAMES = list(_EMPTY)


def _joined(first: str, last: str) -> bytes:
    return b"".join(_EMPTY[name] for name in _NAMES[_NAMES.index(first) : _NAMES.index(last) + 1])


_BEFORE_ROOTS = _joined("sha3Uncles", "stateRoot")
_ROOTS = _joined("transactionsRoot", "difficulty")
_AFTER_TIME = _joined("extraData", "requestsHash")


def header_rlp(parent: bytes, block: Block | None, number: int) -> bytes:
    """The header as it is hashed; `block` is None where it has no logs."""
    if block is None:
        roots, gas_used = _ROOTS, b"\x80"
    else:
        roots = b"\xa0%b\xa0%b\xb9\x01\x00%b\x80" % (block.transactions_root, block.receipts_root, block.bloom)
        gas_used = rlp_number(block.gas_used)
    times = rlp_number(number) + _EMPTY["gasLimit"] + gas_used + rlp_number(time_s(number))
    return rlp_list(b"\xa0" + parent + _BEFORE_ROOTS + roots + times + _AFTER_TIME)


def header_json(chain: Chain, number: int, *, full: bool) -> bytes:
    """A block as eth_getBlockByNumber answers it, with whole transactions where they are asked for."""
    block, block_hash = chain.block(number), chain.hashes[number]
    if full:
        transactions = [transaction_json(number, at, one, block_hash) for at, one in enumerate(block.tx_hashes)]
    else:
        transactions = [b'"0x%b"' % tx_hash.hex().encode() for tx_hash in block.tx_hashes]
    varying = {
        "hash": block_hash.hex().encode(),
        "parentHash": chain.hashes[number - 1].hex().encode() if number else b"00" * 32,
        "transactionsRoot": block.transactions_root.hex().encode(),
        "receiptsRoot": block.receipts_root.hex().encode(),
        "logsBloom": block.bloom.hex().encode(),
        "number": b"%x" % number,
        "gasUsed": b"%x" % block.gas_used,
        "timestamp": b"%x" % time_s(number),
        "transactions": b",".join(transactions),
    }
    return _HEADER % {name.encode(): value for name, value in varying.items()}


def _header_template() -> bytes:
    varying = ("parentHash", "transactionsRoot", "receiptsRoot", "logsBloom", "number", "gasUsed", "timestamp")
    fields = header_fields(bytes(32), Block(0, 0, (), (), _NO_BLOOM, EMPTY_ROOT, EMPTY_ROOT))
    texts = {name: "0x" + value.hex() if isinstance(value, bytes) else hex(value) for name, value in fields.items()}
    texts |= {"hash": "0x%(hash)b", **{name: f"0x%({name})b" for name in varying}}
    rest = json.dumps(texts | {"size": "0x3e8", "uncles": [], "withdrawals": []}, separators=(",", ":"))
    return rest[:-1].encode() + b',"transactions":[%(transactions)b]}'


_HEADER = _header_template()


def log_json(log: Emitted, block: Block, block_hash: bytes, at: int) -> bytes:
    """A log at its place; each transaction of a block has one, so that its place is that of the transaction."""
    return _LOG % (
        log.address.hex().encode(),
        b",".join(b'"0x%b"' % topic.hex().encode() for topic in log.topics),
        log.data.hex().encode(),
        block.number,
        block.tx_hashes[at].hex().encode(),
        at,
        block_hash.hex().encode(),
        at,
    )


_LOG = (
    b'{"address":"0x%b","topics":[%b],"data":"0x%b","blockNumber":"0x%x","transactionHash":"0x%b",'
    b'"transactionIndex":"0x%x","blockHash":"0x%b","logIndex":"0x%x","removed":false}'
)


_TOPIC_BEGIN = len(b'{"address":"0x') + 40 + len(b'","topics":["0x')
ADDRESS_END = len(b'{"address":"0x') + 40


def address_prefix(address: str) -> bytes:
    """What a log of this contract begins with, up to `ADDRESS_END`."""
    return b'{"address":"0x%b' % address[2:].lower().encode()


def first_topic(log: bytes) -> bytes:
    """The first topic of a rendered log."""
    return bytes.fromhex(log[_TOPIC_BEGIN : _TOPIC_BEGIN + 64].decode())


def logs_json(chain: Chain, block: Block) -> list[bytes]:
    """All logs of a block."""
    block_hash, count = chain.hashes[block.number], len(block.tx_hashes)
    transfers = range(min(TRANSFERS, count))
    return [
        *(log_json(transfer(block.number, at), block, block_hash, at) for at in transfers),
        *chain.logs[block.first_log : block.first_log + max(0, count - TRANSFERS)],
    ]


def receipts_json(chain: Chain, number: int) -> list[bytes]:
    """The receipts of a block, in order."""
    block = chain.block(number)
    block_hash, logs = chain.hashes[number].hex().encode(), logs_json(chain, block)
    return [
        _RECEIPT
        % (
            tx_hash.hex().encode(),
            at,
            block_hash,
            number,
            GAS_PER_TRANSACTION * (at + 1),
            logs[at],
            block.blooms[at].hex().encode(),
        )
        for at, tx_hash in enumerate(block.tx_hashes)
    ]


_RECEIPT = (
    b'{"transactionHash":"0x%%b","transactionIndex":"0x%%x","blockHash":"0x%%b","blockNumber":"0x%%x",'
    b'"from":"0x%b","to":"0x%b","gasUsed":"0x%x","effectiveGasPrice":"0x%x","contractAddress":null,'
    b'"cumulativeGasUsed":"0x%%x","logs":[%%b],"logsBloom":"0x%%b","type":"0x2","status":"0x1"}'
) % ((bytes(19) + b"\x0b").hex().encode(), _TO.hex().encode(), GAS_PER_TRANSACTION, 2 * 10**9)
