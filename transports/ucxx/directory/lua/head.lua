-- The directory of a data plane, as server-side functions: each call is atomic, each mutation happens once.
--
-- KEYS[1] is the partition's prefix, "<namespace>:{<partition>}:"; all its keys begin with it, so a cluster keeps them on
-- one node. ARGV: op_id ('' for what changes nothing), not_after (microseconds of this server's clock), the version of the
-- schema that the caller knows, a msgpack payload. The answer is {code, blob} or {code, blob, blob}.
--
--   p  hash: ver doc gsize nt (schema) inc seq bytes gone (counters) ix ixn (ready indexes) moved (see `moves`)
--   i  hash: id -> rid, the row's incarnation in 16 digits
--   r:<shelf> hash: rid -> row (see ID below), of all rids that begin with the same 13 digits     s  zset: shelves
--   g  hash: group -> group (see EXPECT below); without whole groups, a row alone in the group of its own name has none
--   d  hash: homes of the rows of a complete group, sorted and joined -> how many such groups there are
--   k:<task> hash: rid -> claim id     C  hash: claim id -> claim     R  hash: claim id -> rids     L  zset: leases
--   q:<index> zset: what is ready, by the put that made it so, the older first (queue.lua)
--   w:<index> zset: unready rows, by age     b:<index> zset: shelves that a new index has not seen yet     l:<claim> set: lost ids
--   o:<op_id>  what became of a mutation: its answer, or '!' where it is refused for ever
--   z  the last rid of a partition that was dropped, kept for a day
local OK, SCHEMA, UNKNOWN, REFUSED, LATE, ERROR, INDEXING = 0, 1, 2, 3, 4, 5, 6
local KEEP_S = 600
local MOST_OP_S = 7 * 86400 -- an op_id of a call without deadline is not kept for ever
local CHUNK = 4000 -- unpack() puts its values on a stack of 8000
local WIDTH = 16
-- An entry of i, g and k:<task> that is no id's, group's or rid's (it is no text): a hash of at most 512 short entries would be a
-- list that each look-up goes through, ten times as slow for 256 rows as a table, which one long entry makes of it.
local FIVE = '\255\255\255\255\255'
local PAD = FIVE .. FIVE .. FIVE .. FIVE .. FIVE .. FIVE .. FIVE .. FIVE .. FIVE .. FIVE .. FIVE .. FIVE .. FIVE
-- A row, a msgpack array. CELLS is msgpack in it, [[slot key, index, [field], [bytes]]], TAGS the caller's msgpack map, or they
-- are false. What follows is the same for most rows of a put. PROD maps field number -> number of the put that brought it first.
local ID, GROUP, SIZE0, BYTES, CELLS, TAGS = 1, 2, 3, 4, 5, 6
local OWNER, CREATED, ELIGIBLE, COMMITTED, FAILED, EXPECTED, PROD = 7, 8, 9, 10, 11, 12, 13
-- Not there yet while the library is loaded.
local function pack(...) return cmsgpack.pack(...) end
local function unpack_(v) return cmsgpack.unpack(v) end
local function digits(number) return string.format('%016d', number) end

local function now_us()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end

-- One command for many arguments: one command per row costs three times as much.
local function many(cmd, key, args)
  local n = #args
  for i = 1, n, CHUNK do redis.call(cmd, key, unpack(args, i, math.min(i + CHUNK - 1, n))) end
end

local function hmget(key, names)
  local n = #names
  if n == 0 then return {} end
  if n <= CHUNK then return redis.call('HMGET', key, unpack(names)) end
  local out = {}
  for i = 1, n, CHUNK do
    local part = redis.call('HMGET', key, unpack(names, i, math.min(i + CHUNK - 1, n)))
    for j = 1, #part do out[i + j - 1] = part[j] end
  end
  return out
end

local function split(rids)
  local out = {}
  for i = 1, #rids, WIDTH do out[#out + 1] = string.sub(rids, i, i + WIDTH - 1) end
  return out
end

-- When this server, or this library, began to answer. One that was restarted with older data has lost what came after it: what
-- it gives out now is of this start, so that it is never taken for what was lost.
local began
local function since_start(now)
  began = began or now
  return now - began
end

local function open(K, now)
  since_start(now)
  local v = redis.call('HMGET', K .. 'p', 'ver', 'gsize', 'nt', 'inc', 'seq', 'bytes', 'ix', 'ixn', 'gone', 'moved')
  if not v[1] then return nil end
  local gsize = tonumber(v[2])
  return {
    K = K, now = now, ver = v[1], gsize = gsize > 0 and gsize or nil, nt = tonumber(v[3]),
    inc = math.max(tonumber(v[4]), began), seq = tonumber(v[5]), bytes = tonumber(v[6]), ix = unpack_(v[7]), ixn = tonumber(v[8]),
    gone = tonumber(v[9]), moved = tonumber(v[10] or 0), stale = {}, whole = {}, places = {},
  }
end

-- Incarnations begin at the clock, so those of a dropped partition, or of a lost plane, never come again.
local function fresh(K, now)
  local last = tonumber(redis.call('GET', K .. 'z') or '0')
  return {
    K = K, now = now, ver = '0', nt = 0, inc = math.max(now, last), seq = 0, bytes = 0, ix = {}, ixn = 0,
    gone = 0, moved = now, stale = {}, whole = {}, places = {},
  }
end

-- Notes that rows, or fields of rows, are not where they were.
local function moves(P) P.moved = math.max(P.now, P.moved + 1) end

local function moved_at(P) return string.format('%.0f,%.0f', P.moved, began) end

-- Notes that `n` more groups are complete whose rows lie on these homes.
local function count_whole(P, homes, n) P.whole[homes] = (P.whole[homes] or 0) + n end

local function save(P)
  redis.call('HSET', P.K .. 'p', 'inc', string.format('%d', P.inc), 'seq', string.format('%d', P.seq),
    'bytes', string.format('%.0f', P.bytes), 'ix', pack(P.ix), 'ixn', P.ixn, 'gone', string.format('%d', P.gone),
    'moved', string.format('%.0f', P.moved))
  local ask, set, del = {}, {}, {}
  for homes, n in pairs(P.whole) do if n ~= 0 then ask[#ask + 1] = homes end end
  for j, old in ipairs(hmget(P.K .. 'd', ask)) do
    local n = tonumber(old or 0) + P.whole[ask[j]]
    if n > 0 then set[#set + 1] = ask[j]; set[#set + 1] = n else del[#del + 1] = ask[j] end
  end
  many('HSET', P.K .. 'd', set)
  many('HDEL', P.K .. 'd', del)
  P.whole = {}
end

local function set_schema(P, doc, gsize, nt)
  P.ver = string.format('%.0f', math.max(P.now, tonumber(P.ver) + 1))
  P.gsize = gsize > 0 and gsize or nil
  P.nt = nt
  redis.call('HSET', P.K .. 'p', 'ver', P.ver, 'doc', doc, 'gsize', gsize, 'nt', nt)
end

local function schema(P)
  return { SCHEMA, P.ver, redis.call('HGET', P.K .. 'p', 'doc') }
end

local function entries(key) return math.max(redis.call('HLEN', key) - 1, 0) end

-- Rows lie on shelves, hashes of at most 1000: rows that were put together are near each other in the server's memory, however
-- many there are. In one hash of a million rows, those that a claim reads cost four times as much.
local SHELF = 13
local function shelves(rids)
  local names, at = {}, {}
  for j = 1, #rids do
    local name = string.sub(rids[j], 1, SHELF)
    local here = at[name]
    if here then here[#here + 1] = j else at[name] = { j }; names[#names + 1] = name end
  end
  return names, at
end

local function load_rows(K, rids)
  local names, at = shelves(rids)
  if #names == 1 then return hmget(K .. 'r:' .. names[1], rids) end
  local out = {}
  for _, name in ipairs(names) do
    local here, ask = at[name], {}
    for n, j in ipairs(here) do ask[n] = rids[j] end
    for n, blob in ipairs(hmget(K .. 'r:' .. name, ask)) do out[here[n]] = blob end
  end
  return out
end

local function store_rows(K, rids, blobs)
  local names, at = shelves(rids)
  local known = {}
  for _, name in ipairs(names) do
    local flat = {}
    for n, j in ipairs(at[name]) do flat[2 * n - 1] = rids[j]; flat[2 * n] = blobs[j] end
    many('HSET', K .. 'r:' .. name, flat)
    known[#known + 1] = 0; known[#known + 1] = name
  end
  many('ZADD', K .. 's', known)
end

local function remove_rows(K, rids)
  local names, at = shelves(rids)
  local empty = {}
  for _, name in ipairs(names) do
    local gone = {}
    for n, j in ipairs(at[name]) do gone[n] = rids[j] end
    many('HDEL', K .. 'r:' .. name, gone)
    if redis.call('EXISTS', K .. 'r:' .. name) == 0 then empty[#empty + 1] = name end
  end
  many('ZREM', K .. 's', empty)
end

-- All rows, {rid, row, rid, row, ...}, those of a shelf after those of the shelf before.
local function every_row(K)
  local out = {}
  for _, name in ipairs(redis.call('ZRANGE', K .. 's', 0, -1)) do
    for _, part in ipairs(redis.call('HGETALL', K .. 'r:' .. name)) do out[#out + 1] = part end
  end
  return out
end

-- A notice saves others a look; a user of the server who may not publish does without it, and his call is no failure.
local function notify(K) redis.pcall('PUBLISH', K .. 'n', '') end

local function refuse(K, op)
  redis.call('SET', K .. 'o:' .. op, '!', 'EX', 2 * KEEP_S)
end

-- Runs a mutation once per op_id. `act` returns its answer and whether it changed something, or nothing beside where the
-- same request may be tried again. An answer is remembered for longer than not_after also where there was nothing to
-- remove: sent again, after its reply was lost, the removal would take what was put meanwhile.
local function once(keys, args, act)
  local K, now = keys[1], now_us()
  local okey = K .. 'o:' .. args[1]
  local old = redis.call('GET', okey)
  if old then return old == '!' and { REFUSED, '' } or { OK, old } end
  local left = (tonumber(args[2]) - now) / 1000000
  if left < 0 then return { LATE, '' } end
  local reply, changed = act(K, open(K, now), args, now)
  if changed ~= nil then redis.call('SET', okey, reply[2], 'EX', math.ceil(math.min(left, MOST_OP_S)) + KEEP_S) end
  if changed then notify(K) end
  return reply
end

-- Runs what may be asked again, with the partition opened.
local function read(act)
  return function(keys, args)
    local now = now_us()
    return (act(keys[1], open(keys[1], now), args, now))
  end
end

local function mutation(act)
  return function(keys, args) return once(keys, args, act) end
end

-- Where the bytes of a msgpack value end. Tags are merged as bytes: Lua would turn 3.0 into 3 and lose large integers.
local EXTRA = { [0xc4] = 1, [0xc5] = 2, [0xc6] = 4, [0xd9] = 1, [0xda] = 2, [0xdb] = 4 }
local PLAIN = { [0xca] = 4, [0xcb] = 8, [0xcc] = 1, [0xcd] = 2, [0xce] = 4, [0xcf] = 8, [0xd0] = 1, [0xd1] = 2, [0xd2] = 4, [0xd3] = 8 }
local function big_endian(s, at, n)
  local v = 0
  for i = at, at + n - 1 do v = v * 256 + string.byte(s, i) end
  return v
end
local function skip(s, at)
  local b = string.byte(s, at)
  if b >= 0xa0 and b < 0xc0 then return at + 1 + b - 0xa0 end
  if PLAIN[b] then return at + 1 + PLAIN[b] end
  if EXTRA[b] then return at + 1 + EXTRA[b] + big_endian(s, at + 1, EXTRA[b]) end
  return at + 1 -- small integers, nil, booleans; tags hold nothing else
end

local function splice(old, new)
  local order, value, n = {}, {}, 0
  for _, s in ipairs({ old, new }) do
    local b, at = string.byte(s, 1), 2
    local count = b - 0x80
    if b == 0xde then count, at = big_endian(s, 2, 2), 4 elseif b == 0xdf then count, at = big_endian(s, 2, 4), 6 end
    for _ = 1, count do
      local mid = skip(s, at)
      local stop = skip(s, mid)
      local key = string.sub(s, at, mid - 1)
      if not value[key] then n = n + 1; order[n] = key end
      value[key] = string.sub(s, mid, stop - 1)
      at = stop
    end
  end
  local low, out = { math.floor(n / 256) % 256, n % 256 }, {}
  if n < 16 then out[1] = string.char(0x80 + n)
  elseif n < 65536 then out[1] = string.char(0xde, unpack(low))
  else out[1] = string.char(0xdf, math.floor(n / 16777216), math.floor(n / 65536) % 256, unpack(low)) end
  for i = 1, n do out[2 * i] = order[i]; out[2 * i + 1] = value[order[i]] end
  return table.concat(out)
end
