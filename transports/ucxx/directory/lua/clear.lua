-- Removing, and finding out what became of a mutation.

local function collect(dead, cells)
  for _, piece in ipairs(unpack_(cells)) do
    local spots = dead[piece[1]]
    if spots then spots[#spots + 1] = piece[2] else dead[piece[1]] = { piece[2] } end
  end
end

-- The first id whose claim is not its holder's any more, if there is one.
local function lost_claim(P, ids, rids, claims)
  local ask, held = {}, {}
  for j, rid in ipairs(rids) do if rid and claims[j] then ask[#ask + 1] = rid; held[rid] = {} end end
  for task = 1, P.nt do
    local by = hmget(P.K .. 'k:' .. task, ask)
    for n, rid in ipairs(ask) do if by[n] then held[rid][by[n]] = true end end
  end
  for j, rid in ipairs(rids) do
    local good = not claims[j] or not rid
    for _, claim in ipairs(claims[j] or {}) do
      if rid then
        good = good or held[rid][claim]
      elseif redis.call('SISMEMBER', P.K .. 'l:' .. claim, ids[j]) == 1 then
        return j -- gone, but it was somebody else's by then
      end
    end
    if not good then return j end
  end
  return nil
end

-- Rows leave the claims that hold them; a claim without rows has ended.
local function settle_claims(P, rids)
  local K, gone = P.K, {}
  for task = 1, P.nt do
    local held = hmget(K .. 'k:' .. task, rids)
    local any = false
    for j = 1, #rids do
      if held[j] then gone[held[j]] = (gone[held[j]] or 0) + 1; any = true end
    end
    if any then many('HDEL', K .. 'k:' .. task, rids) end
  end
  for claim, count in pairs(gone) do
    local head = unpack_(redis.call('HGET', K .. 'C', claim))
    head[C_LIVE] = head[C_LIVE] - count
    if head[C_LIVE] > 0 then
      redis.call('HSET', K .. 'C', claim, pack(head))
    else
      redis.call('HDEL', K .. 'C', claim)
      redis.call('HDEL', K .. 'R', claim)
      redis.call('ZREM', K .. 'L', claim)
    end
  end
end

-- Payload: {ids, claims per id or false, rids or false; a rid per id or false}. Another rid than the one meant is as good as gone.
local function clear(K, P, args)
  if not P then return { OK, pack({ 0, {} }) }, false end
  local a = unpack_(args[4])
  local ids, claims, meant = a[1], a[2], a[3]
  expire(P)
  local found = hmget(K .. 'i', ids)
  if meant then
    for j, rid in ipairs(meant) do if rid and found[j] ~= rid then found[j] = false end end
  end
  local wrong = claims and lost_claim(P, ids, found, claims)
  if wrong then return { ERROR, pack({ 'lost', wrong }) } end
  local rids, names, seen = {}, {}, {}
  for j, rid in ipairs(found) do
    if rid and not seen[rid] then
      seen[rid] = true
      rids[#rids + 1] = rid
      names[#names + 1] = ids[j]
    end
  end
  if #rids == 0 then return { OK, pack({ 0, {} }) }, false end
  settle_claims(P, rids)
  local rows, dead, groups, group_names = {}, {}, {}, {}
  for j, blob in ipairs(hmget(K .. 'r', rids)) do
    rows[j] = unpack_(blob)
    group_names[j] = rows[j][GROUP]
  end
  for _, cells in ipairs(hmget(K .. 'c', rids)) do if cells then collect(dead, cells) end end
  load_groups(P, group_names, groups)
  for j, row in ipairs(rows) do
    leave(P, groups[row[GROUP]], row[GROUP], rids[j])
    P.bytes = P.bytes - row[BYTES]
  end
  many('HDEL', K .. 'i', names)
  many('HDEL', K .. 'r', rids)
  many('HDEL', K .. 'c', rids)
  many('HDEL', K .. 't', rids)
  save_groups(P, groups)
  untouch(P, rids, groups)
  save(P)
  local freed = {}
  for key, spots in pairs(dead) do freed[#freed + 1] = { key, spots } end
  return { OK, pack({ #rids, freed }) }, true
end

local function drop(K, P)
  if not P then return { OK, pack({}) }, false end
  local dead, freed = {}, {}
  for _, cells in ipairs(redis.call('HVALS', K .. 'c')) do collect(dead, cells) end
  for key, spots in pairs(dead) do freed[#freed + 1] = { key, spots } end
  for _, ix in ipairs(P.ix) do drop_index(P, ix) end
  for task = 1, P.nt do redis.call('UNLINK', K .. 'k:' .. task) end
  for claim in string.gmatch('p i r c t g C R L', '%S') do redis.call('UNLINK', K .. claim) end
  redis.call('SET', K .. 'z', string.format('%.0f', P.inc), 'EX', 86400)
  return { OK, pack(freed) }, true
end

-- ARGV[1] is the op_id; ARGV[2] is '1' where it is past what is remembered. With 'done' comes the mutation's answer: of
-- the rows that it removed the client has told nobody yet.
local function resolve(keys, args)
  local K = keys[1]
  local old = redis.call('GET', K .. 'o:' .. args[1])
  if old == '!' then return { OK, 'refused' } end
  if old then return { OK, 'done', old } end
  if args[2] == '1' then return { OK, 'forgotten' } end
  refuse(K, args[1])
  return { OK, 'refused' }
end
